"""Agents on libraries of PyPI, run by the Python of `make test-agents`: `agent_programs.py NAME URL` talks a few turns."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

RULES = (
    "You are careful. You read a file before you speak of it, say in one sentence what it does, and never guess. " * 4
)
TASKS = ("What does a.py do?", "Who calls it?", "Rename it, please.")


def read_file(path: Literal["a.py", "b.py"]) -> str:
    """Reads a file and returns its lines."""
    return f"def main(): return {path!r}"


def openai_agents(url: str) -> None:
    """OpenAI's Agents SDK, by responses; the first turn must call the tool."""
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), use_for_tracing=False)
    settings = ModelSettings(tool_choice="required", max_tokens=200)
    agent = Agent("Helper", instructions=RULES, tools=[function_tool(read_file)], model="tiny", model_settings=settings)

    async def talk() -> None:
        said: list = []
        for task in TASKS:
            result = await Runner.run(agent, [*said, {"role": "user", "content": task}], max_turns=4)
            said = result.to_input_list()

    asyncio.run(talk())


def langgraph(url: str) -> None:
    """A graph of LangGraph: a model of `langchain-openai` that must call a tool at first, the tool, and the model again."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    model = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=200)

    def speak(state: MessagesState) -> dict:
        forced = "required" if state["messages"][-1].type == "human" else "none"
        bound = model.bind_tools([read_file], tool_choice=forced)
        return {"messages": [bound.invoke([("system", RULES), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("speak", speak)
    graph.add_node("tools", ToolNode([read_file]))
    graph.add_edge(START, "speak")
    graph.add_conditional_edges("speak", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "speak")
    made, messages = graph.compile(), []
    for task in TASKS:
        messages = made.invoke({"messages": [*messages, ("user", task)]})["messages"]


def litellm(url: str) -> None:
    """litellm, as OpenAI's chats and as Anthropic's messages."""
    import litellm

    litellm.suppress_debug_info = True
    schema = {"type": "object", "properties": {"path": {"enum": ["a.py", "b.py"]}}, "required": ["path"]}
    tools = [{"type": "function", "function": {"name": "read_file", "description": "Reads.", "parameters": schema}}]
    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
        messages: list = [{"role": "system", "content": RULES}]
        for task in TASKS:
            messages.append({"role": "user", "content": task})
            for choice in ("required", "none"):
                asked = {"tools": tools, "tool_choice": choice, "max_tokens": 200, "num_retries": 0}
                answer = litellm.completion(
                    f"{provider}/tiny", messages=messages, api_base=base, api_key="none", **asked
                ).choices[0]
                messages.append(answer.message.model_dump(exclude_none=True))
                for call in answer.message.tool_calls or ():
                    told = read_file(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": told})


if __name__ == "__main__":
    {"openai_agents": openai_agents, "langgraph": langgraph, "litellm": litellm}[sys.argv[1]](sys.argv[2])
