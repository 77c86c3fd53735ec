"""Load on an endpoint that speaks OpenAI's protocol: what is asked, how it is sent, and what came of it."""
