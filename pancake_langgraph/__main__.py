"""`python -m pancake_langgraph` is the command `pancake`."""

from pancake_langgraph.cli.main import main

main()
