"""What runs inside other engines' processes: of the standard library and of what the engine has; nothing of ours."""
