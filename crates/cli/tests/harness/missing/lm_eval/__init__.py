raise ModuleNotFoundError("No module named 'lm_eval'")
