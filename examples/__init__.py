"""Small LangGraph apps.  Each has `build_graph(model)` and `inputs()`."""
