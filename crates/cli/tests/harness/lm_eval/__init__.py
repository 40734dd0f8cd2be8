"""Stands in for lm-evaluation-harness in the tests of lmx evaluate: the parts that its driver touches.

The "task" is a JSON file of requests; its "metrics" are the model's answers.
"""

import json
import os

__version__ = "0.0"


class Instance:
    def __init__(self, arguments):
        self.args = tuple(arguments)


def simple_evaluate(model, tasks, evaluation_tracker, apply_chat_template, **settings):
    print("noise that must not reach standard output")
    with open(os.environ["LMX_TEST_REQUESTS"], encoding="utf-8") as file:
        requests = json.load(file)
    answers = {"apply_chat_template": apply_chat_template, "settings": {k: v for k, v in settings.items() if k != "task_manager"}}
    for chat in requests.pop("chats", []):
        text = model.apply_chat_template(chat, add_generation_prompt=chat[-1]["role"] == "user")
        answers.setdefault("chats", []).append(text)
        requests.setdefault("generate_until", []).append([text, {"until": ["\n"]}])
    for kind, arguments in requests.items():
        answers[kind] = getattr(model, kind)([Instance(a) for a in arguments], disable_tqdm=True)
    answers["described"] = model.get_model_info()
    answers["chat_template"] = model.chat_template(apply_chat_template)
    return {"results": {task: answers for task in tasks}, "samples": {task: [answers] for task in tasks}}
