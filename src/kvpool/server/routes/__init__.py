"""One module per form of the API: completions and chats, messages, responses, the cache."""
