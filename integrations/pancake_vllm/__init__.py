"""Code of Pancake that runs inside vLLM, through vLLM's own extension points.

Imported by the engine process only.  Nothing in `pancake_langgraph` imports it; `pancake_langgraph.launch` names it in
the engine's arguments.
"""
