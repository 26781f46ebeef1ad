"""The unit suite that LangChain gives to every chat model."""

import importlib
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from pancake_langgraph.chat_model import PancakeChatModel

loading = importlib.import_module("langchain_core.load.load")  # the package shadows the module by its function
PATH = ("pancake_langgraph", "chat_model", "PancakeChatModel")


@pytest.fixture(autouse=True)
def _application_trusts_our_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """LangChain revives only classes of its own table; the suite has no way to name others, so we are put in it."""
    monkeypatch.setitem(loading.ALL_SERIALIZABLE_MAPPINGS, PATH, PATH)
    monkeypatch.setattr(loading, "_default_class_paths_cache", {})


class TestPancakeChatModelUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return PancakeChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "small", "base_url": "http://127.0.0.1:9/v1"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {
                "PANCAKE_API_KEY": "key",
                "PANCAKE_BASE_URL": "http://127.0.0.1:7/v1",
                "PANCAKE_MODEL": "other",
                "OPENAI_API_KEY": "not-ours",
                "OPENAI_API_BASE": "http://127.0.0.1:6/v1",
                "OPENAI_BASE_URL": "http://127.0.0.1:6/v1",
                "OPENAI_ORG_ID": "not-ours",
                "OPENAI_PROXY": "http://127.0.0.1:6",
            },
            {},
            {
                "openai_api_key": "key",
                "openai_api_base": "http://127.0.0.1:7/v1",
                "model_name": "other",
                "openai_proxy": "",
                "openai_organization": None,
            },
        )
