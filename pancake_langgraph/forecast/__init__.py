"""Forecasting: which node runs next, how sure, and how soon."""
