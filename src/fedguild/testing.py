"""Federations in one process, for the tests of methods and plug-ins: `fedguild.federation.testing`."""

from fedguild.federation.testing import *  # noqa: F403
