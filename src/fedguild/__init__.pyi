from fedguild.core.errors import FedGuildError as FedGuildError
from fedguild.runs.api.comparing import compare as compare
from fedguild.runs.api.comparing import load_comparison as load_comparison
from fedguild.runs.api.looking import inspect_data as inspect_data
from fedguild.runs.api.looking import partition as partition
from fedguild.runs.api.looking import premise as premise
from fedguild.runs.api.looking import profile as profile
from fedguild.runs.api.models import export_model as export_model
from fedguild.runs.api.models import load_model as load_model
from fedguild.runs.api.pushing import push as push
from fedguild.runs.api.runs import evaluate as evaluate
from fedguild.runs.api.runs import resume as resume
from fedguild.runs.api.runs import run as run
from fedguild.runs.api.sweeping import sweep as sweep
from fedguild.runs.callbacks import Event as Event
from fedguild.runs.callbacks.early_stopping import EarlyStopping as EarlyStopping
from fedguild.runs.results import Comparison as Comparison
from fedguild.runs.results import RunResult as RunResult
from fedguild.runs.results import Sweep as Sweep
from fedguild.runs.results import load_run as load_run

__version__: str
__all__: list[str]
