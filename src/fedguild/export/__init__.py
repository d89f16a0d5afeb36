"""After the engines, beside the experiment: export. A run's model in formats that other libraries load.

`weights` says how a deployment changes the backbone's weights. `adapter` writes that as a PEFT
folder, `merged` as a whole Hugging Face checkpoint, both into a folder that appears complete or
not at all (`folder`) and describes itself (`card`). `run` takes the deployment from a run.
"""

from fedguild.export.run import Exported, Subject, export_adapter, export_merged

__all__ = ["Exported", "Subject", "export_adapter", "export_merged"]
