"""Parts of `PancakeChatModel`: connections, server facts, reading answers, structured output."""
