"""`python -m fedguild`: the `fedguild` command."""

from fedguild.cli import main

main()
