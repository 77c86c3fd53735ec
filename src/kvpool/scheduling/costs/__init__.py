"""What steps and transfers cost: a linear model, and how it is fitted to what was measured."""
