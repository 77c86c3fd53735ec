"""The router as a process: in front of OpenAI servers that publish what they cache."""
