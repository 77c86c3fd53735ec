"""An endpoint with OpenAI's API: what it takes, what it answers, and what it counts."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvpool.errors import EndpointError, InvalidArgumentError
from kvpool.terminal import is_http

Prompt = str | tuple[int, ...]

NUM_BEST: Final = 5  # of the likeliest tokens at each place
LEAST: Final = -50.0  # the logarithm of a probability that counts as none
_BUSY: Final = (429, 503)
_TRIES: Final = 5

# Counters of cached prompt tokens, and the label or the name that says where they were.
_COUNTERS: Final = {
    "kvpool_hit_tokens_total": ("tier", ""),
    "vllm:prefix_cache_hits_total": ("", "gpu"),
    "vllm:external_prefix_cache_hits_total": ("", "connector"),
    "sglang:cached_tokens_total": ("cache_source", "device"),
}
DEVICE: Final = ("gpu", "device")  # what these call the engine's own memory
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+.\deE]+)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# Ways to empty the cache: of kvpool, vLLM (VLLM_SERVER_DEV_MODE=1) and SGLang.
_RESETS: Final[tuple[tuple[str, Any], ...]] = (
    ("/v1/cache/invalidate", {"everything": True}),
    ("/reset_prefix_cache?reset_external=true", None),
    ("/flush_cache", None),
)
# What makes answers of a known length and comparable. An endpoint that refuses one of them is asked without it.
_WISHES: Final[Mapping[str, Any]] = {"ignore_eos": True, "seed": 0}


class Answer(NamedTuple):
    """What came back: the text, its tokens with the likeliest ones in their places, and how much came from the cache."""

    text: str
    tokens: tuple[str, ...] = ()
    best: tuple[dict[str, float], ...] = ()  # empty where the endpoint gives no log probabilities
    num_prompt_tokens: int = 0
    num_cached: int | None = None  # None: it does not say

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Answer:
        """Reads the body of a completion or of a chat."""
        try:
            choice, usage = body["choices"][0], body.get("usage") or {}
            text = choice["text"] if "text" in choice else choice["message"].get("content") or ""
            tokens, best = _logprobs(choice.get("logprobs") or {})
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens")
            return cls(str(text), tokens, best, int(usage.get("prompt_tokens") or 0), cached)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EndpointError(f"the endpoint answered in no form of OpenAI's: {str(body)[:200]!r}") from error


def _logprobs(given: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[dict[str, float], ...]]:
    """Tokens and the likeliest ones in their places, of either form."""
    if "content" in given:  # of a chat
        places = given["content"] or ()
        best = tuple(
            _of_place([(top["token"], top["logprob"]) for top in (each, *(each.get("top_logprobs") or ()))])
            for each in places
        )
        return tuple(each["token"] for each in places), best
    tokens, own = given.get("tokens") or (), given.get("token_logprobs") or ()
    tops = given.get("top_logprobs") or [{}] * len(tokens)
    best = tuple(
        _of_place([(token, value), *(top or {}).items()])
        for token, value, top in zip(tokens, own, tops, strict=True)
        if value is not None
    )
    return tuple(tokens), best if len(best) == len(tokens) else ()


def _of_place(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """The likeliest tokens by their texts. Of tokens with equal texts the best counts."""
    found: dict[str, float] = {}
    for token, value in pairs:
        found[token] = max(found.get(token, LEAST), float(value))
    return found


class Endpoint:
    """Asks one model of an endpoint, from any thread.

    `negotiate` finds out which of the optional fields it takes. `key` is sent as a bearer token.
    """

    def __init__(self, url: str, model: str | None = None, key: str = "", timeout: float = 300.0) -> None:
        if not is_http(url):
            raise InvalidArgumentError(f"{url!r} is no address of an endpoint; write it as http://127.0.0.1:8000")
        parts = urlsplit(url)
        self.url = url
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = str(parts.hostname), parts.port
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._timeout = timeout
        self._fields: dict[str, Any] = {}
        self._reset: tuple[str, Any] | None = None
        self.is_chat = self.has_logprobs = self.takes_salts = self.takes_tokens = False
        self.served = self._models()
        chosen = model or next(iter(self.served))
        if chosen not in self.served:
            raise InvalidArgumentError(f"--model is {chosen!r}; the endpoint serves {', '.join(self.served)}")
        self.model = chosen

    @property
    def owner(self) -> str:
        """Which engine it says it is, such as vllm."""
        return str(self.served[self.model].get("owned_by", "")).lower()

    @property
    def context(self) -> int | None:
        """How many tokens the model takes, where the endpoint says it."""
        found = self.served[self.model].get("max_model_len")
        return None if found is None else int(found)

    def negotiate(self) -> None:
        """Asks a few short questions to learn which path and which fields the endpoint takes."""
        words = "The sea is calm and the ship"
        if self._takes(words):
            self.takes_tokens = self._takes((11, 12, 13))
        else:
            self.is_chat = True
            self._post(self._path, self._body(words, 1, None, None))  # raises what it says
        for name, value in _WISHES.items():
            if self._takes(words, **{name: value}):
                self._fields[name] = value
        wanted = {"logprobs": True, "top_logprobs": NUM_BEST} if self.is_chat else {"logprobs": NUM_BEST}
        if self._takes(words, **wanted):
            self._fields |= wanted
            self.has_logprobs = bool(self.ask(words, num_tokens=1).best)
        self.takes_salts = self._takes(words, cache_salt="a")

    def ask(self, prompt: Prompt, *, num_tokens: int, salt: str | None = None, adapter: str | None = None) -> Answer:
        """The likeliest answer to a prompt. With a salt only prompts with the same one may share its cache."""
        return Answer.of(self._post(self._path, self._body(prompt, num_tokens, salt, adapter)))

    def leave(self, prompt: Prompt, *, salt: str | None = None, num_tokens: int = 64) -> None:
        """Begins a stream and closes the connection when its first token has come."""
        body = {**self._body(prompt, num_tokens, salt, None), "stream": True}
        connection = self._open()
        try:
            connection.request("POST", self._root + self._path, json.dumps(body), self._headers)
            answer = connection.getresponse()
            if answer.status == 200:
                answer.readline()
        except (OSError, http.client.HTTPException) as error:
            raise EndpointError(f"{self.url} broke off a stream: {error}") from error
        finally:
            connection.close()

    def reset(self) -> bool:
        """Empties the cache; whether the endpoint has a way for that."""
        for path, body in _RESETS if self._reset is None else (self._reset,):
            given = body and {**body, "model": self.model}
            status, _ = self._call("POST", path, given)
            if status == 200:
                self._reset = path, body
                return True
        return False

    def sources(self) -> dict[str, float] | None:
        """How many prompt tokens came from where so far, by `/metrics`; None where it does not say."""
        status, text = self._call("GET", "/metrics")
        found: dict[str, float] = {}
        for line in text.splitlines() if status == 200 else ():
            sample = _SAMPLE.match(line)
            if sample is not None and sample[1] in _COUNTERS:
                label, name = _COUNTERS[sample[1]]
                source = dict(_LABEL.findall(sample[2] or "")).get(label, name) or name
                found[source.lower()] = found.get(source.lower(), 0.0) + float(sample[3])
        return found or None

    def tokenized(self, text: str) -> list[int]:
        """The tokens of a text, where the endpoint has `/tokenize`."""
        status, answer = self._call("POST", "/tokenize", {"model": self.model, "prompt": text})
        try:
            return [int(token) for token in json.loads(answer)["tokens"]] if status == 200 else []
        except (ValueError, KeyError, TypeError):
            return []

    def wait(self, seconds: float) -> None:
        """Waits until it answers, for instance after a restart."""
        due = time.monotonic() + seconds
        while True:
            try:
                self.ask("Are you there?", num_tokens=1)
                return
            except EndpointError as error:
                if time.monotonic() > due:
                    raise EndpointError(f"{self.url} did not answer within {seconds:.0f} s: {error}") from error
                time.sleep(0.2)

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def _body(self, prompt: Prompt, num_tokens: int, salt: str | None, adapter: str | None) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        more = {} if salt is None else {"cache_salt": salt}
        fixed = {"model": adapter or self.model, "temperature": 0, "max_tokens": num_tokens}
        return {**fixed, **asked, **self._fields, **more}

    def _takes(self, prompt: Prompt, **fields: Any) -> bool:
        """Whether a request with these fields is answered."""
        status, _ = self._call("POST", self._path, {**self._body(prompt, 1, None, None), **fields})
        return status == 200

    def _models(self) -> dict[str, dict[str, Any]]:
        status, text = self._call("GET", "/v1/models")
        try:
            listed = {str(each["id"]): each for each in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError):
            listed = {}
        if status != 200 or not listed:
            raise EndpointError(
                f"{self.url}/v1/models answered with status {status} and no list of models; "
                "give the address of an endpoint with OpenAI's API, and --key if it wants one"
            )
        return listed

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        """An answer; what is refused raises. An endpoint that is busy is asked again."""
        for attempt in range(_TRIES):
            status, text = self._call("POST", path, body)
            if status == 200:
                break
            if status not in _BUSY or attempt == _TRIES - 1:
                raise EndpointError(f"{path} answered with status {status}: {text[:300]}")
            time.sleep(0.5 * 2**attempt)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EndpointError(f"{path} answered with no JSON object: {text[:200]!r}")
        return found

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """The status and the text of an answer."""
        connection = self._open()
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._root + path, data, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise EndpointError(f"{self.url} does not answer: {error!r}") from error
        finally:
            connection.close()

    def _open(self) -> http.client.HTTPConnection:
        return self._connect(self._host, self._port, timeout=self._timeout)
