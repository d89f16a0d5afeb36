"""The definition of a run, typed and validated once, before anything is loaded.

`load_config` reads a YAML file or a preset, applies `key.sub=value` overrides, and returns a
frozen `Config`. The packages after this one, up to `runs`, never see it: they take plain arguments, or their own
section (`TrainingSettings`, `FederationSettings`, `SplitSettings`).
"""

from fedguild.config.composing import Axes, Part, Preset, axes, find_preset, presets
from fedguild.config.loading import asking_files, load_config, load_saved
from fedguild.config.schema import Config
from fedguild.config.table import ShippedTable, Table, TableCell, table_cells, tables

__all__ = [
    "Axes",
    "Config",
    "Part",
    "Preset",
    "ShippedTable",
    "Table",
    "TableCell",
    "asking_files",
    "axes",
    "find_preset",
    "load_config",
    "load_saved",
    "presets",
    "table_cells",
    "tables",
]
