from fedguild.api.comparing import compare as compare
from fedguild.api.looking import partition as partition
from fedguild.api.looking import premise as premise
from fedguild.api.looking import profile as profile
from fedguild.api.models import export_model as export_model
from fedguild.api.models import load_model as load_model
from fedguild.api.pushing import push as push
from fedguild.api.runs import evaluate as evaluate
from fedguild.api.runs import resume as resume
from fedguild.api.runs import run as run
from fedguild.api.sweeping import sweep as sweep
from fedguild.callbacks import Event as Event
from fedguild.callbacks.early_stopping import EarlyStopping as EarlyStopping
from fedguild.errors import FedGuildError as FedGuildError
from fedguild.results import Comparison as Comparison
from fedguild.results import RunResult as RunResult
from fedguild.results import Sweep as Sweep
from fedguild.results import load_run as load_run

__version__: str
__all__: list[str]
