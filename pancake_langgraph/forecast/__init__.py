"""Forecasting: which node runs next, how sure, and how soon."""

from pancake_langgraph.forecast.base import Forecaster, Quantiles
from pancake_langgraph.forecast.declared import Declared, Need
from pancake_langgraph.forecast.evidence import Clue
from pancake_langgraph.forecast.transitions import TransitionForecaster

__all__ = ["Clue", "Declared", "Forecaster", "Need", "Quantiles", "TransitionForecaster", "create_forecaster"]


def create_forecaster() -> Forecaster:
    """Return the forecaster that runs by default: topology as prior, transitions learned online."""
    return TransitionForecaster()
