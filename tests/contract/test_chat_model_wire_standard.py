"""The integration suite that LangChain gives to every chat model, over a real socket, in vLLM's recorded shapes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.testing.wire_replies import Recording
from pancake_langgraph.testing.wire_server import WireServer
from tests.contract.wire_standard_brain import StandardBrain

RECORDING = Path(__file__).parents[1] / "data" / "vllm_answers.json"


class Running:
    """The suite asks for parameters where no fixture can be passed."""

    server: WireServer


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with WireServer(StandardBrain(Recording.load(RECORDING)), served=("small", "large")) as server:
        Running.server = server
        yield
        assert not server.faults


class TestPancakeChatModelWire(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return PancakeChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "small", "base_url": Running.server.base_url}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "large"

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        model = PancakeChatModel(**self.chat_model_params)
        if not stream:
            return model.invoke("Hello")
        whole = None
        for chunk in model.stream("Hello"):
            whole = chunk if whole is None else whole + chunk
        return whole
