"""From what a user says about devices to where a model's weights go."""
