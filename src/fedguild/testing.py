"""For the tests of methods and plug-ins: a method's promises, and federations with hostile clients in one process."""

from fedguild.federation.testing import *  # noqa: F403
from fedguild.runs.promises import check_method as check_method
