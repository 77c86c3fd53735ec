"""The router as an HTTP proxy in front of OpenAI servers that publish what they cache."""
