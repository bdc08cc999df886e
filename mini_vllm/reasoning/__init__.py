"""What a server does of its own about a model's reasoning: `thinking_budget` ends it in time."""
