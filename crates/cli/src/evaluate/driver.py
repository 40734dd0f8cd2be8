"""Runs lm-evaluation-harness with a model that lives in the lmx process which started this one.

The two talk over a loopback socket: a JSON object a line, each of which has one answer. All that is to be done comes
from there. Standard output is not touched.
"""

import glob
import json
import os
import socket
import sys
import traceback

# Requests of one line: few enough that progress is seen, many enough that the batch is full most of the time.
SCORED, GENERATED = 128, 64


class Refused(Exception):
    """lmx's answer to what was asked of it, or a mistake in what the user asked for."""


class Endpoint:
    def __init__(self):
        host, port, self.key = os.environ.pop("LMX_ENDPOINT").split(" ")
        connection = socket.create_connection((host, int(port)))
        self.file = connection.makefile("rw", encoding="utf-8", newline="\n")

    def ask(self, what, content):
        self.file.write(json.dumps({what: content}) + "\n")
        self.file.flush()
        line = self.file.readline()
        if not line:
            sys.exit(1)  # lmx has ended, and has said why
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["result"]


def evaluate(endpoint):
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.loggers import EvaluationTracker
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        command = f"{sys.executable} -m pip install lm-eval"
        raise Refused(
            f"lm-evaluation-harness cannot be loaded by {sys.executable} ({error}). Install it with '{command}', "
            "or name another Python with --python"
        )

    class Lmx(LM):
        """Every request goes to lmx, which tokenizes, truncates, batches and computes."""

        def __init__(self, settings):
            super().__init__()
            self.settings = settings

        def run(self, what, requests, at_once, quiet):
            answers = []
            with tqdm(total=len(requests), desc=what.replace("_", " "), disable=quiet) as bar:
                for begin in range(0, len(requests), at_once):
                    chunk = [request.args for request in requests[begin : begin + at_once]]
                    some = endpoint.ask(what, chunk)
                    for arguments, answer in zip(chunk, some):
                        answer = tuple(answer) if isinstance(answer, list) else answer
                        self.cache_hook.add_partial(what, arguments, answer)
                        answers.append(answer)
                    bar.update(len(chunk))
            return answers

        def loglikelihood(self, requests, disable_tqdm=False):
            return self.run("loglikelihood", requests, SCORED, disable_tqdm)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return self.run("loglikelihood_rolling", requests, SCORED, disable_tqdm)

        def generate_until(self, requests, disable_tqdm=False):
            return self.run("generate_until", requests, GENERATED, disable_tqdm)

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            asked = {"messages": chat_history, "add_generation_prompt": add_generation_prompt}
            return endpoint.ask("apply_chat_template", asked)

        def chat_template(self, chat_template=False):
            return self.settings["chat_template"] or ""

        @property
        def tokenizer_name(self):
            return self.settings["tokenizer"]

        def get_model_info(self):
            return endpoint.ask("describe", {})

    asked = endpoint.ask("hello", {"key": endpoint.key, "harness": getattr(lm_eval, "__version__", "of unknown version")})
    manager = TaskManager(include_path=asked["include_path"] or None)
    unknown = [task for task in asked["tasks"] if not manager.match_tasks([task])]
    if unknown:
        raise Refused(
            f"--tasks: the harness knows no {', '.join(unknown)} ('lm_eval ls tasks' lists what it knows, "
            "--include-path names a folder with further ones)"
        )
    tasks = list(dict.fromkeys(name for task in asked["tasks"] for name in manager.match_tasks([task])))
    settings = endpoint.ask("load", {})
    tracker = EvaluationTracker(output_path=asked["output_dir"])
    results = lm_eval.simple_evaluate(
        model=Lmx(settings),
        model_args={"path": asked["model"]},
        tasks=tasks,
        num_fewshot=asked["num_shots"],
        batch_size=asked["batch_size"],
        limit=asked["limit"],
        evaluation_tracker=tracker,
        system_instruction=asked["system_prompt"],
        apply_chat_template=settings["apply_chat_template"],
        fewshot_as_multiturn=asked["fewshot_as_multiturn"],
        task_manager=manager,
        random_seed=asked["seed"],
        numpy_random_seed=asked["seed"],
        torch_random_seed=asked["seed"],
        fewshot_random_seed=asked["seed"],
        confirm_run_unsafe_code=asked["confirm_run_unsafe_code"],
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task, of_task in samples.items():
        tracker.save_results_samples(task_name=task, samples=of_task)
    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    # The harness only logs that it could not write.
    written = glob.glob(os.path.join(glob.escape(asked["output_dir"]), "**", f"*{tracker.date_id}.json*"), recursive=True)
    if not any(os.path.basename(path).startswith("results_") for path in written):
        raise Refused(f"--output-dir: the harness could not write to {asked['output_dir']}")
    finished = {"table": "\n".join(tables), "files": sorted(written), "results": results["results"]}
    endpoint.ask("finished", json.loads(json.dumps(finished, default=handle_non_serializable)))


def main():
    endpoint = Endpoint()
    try:
        evaluate(endpoint)
    except Refused as refused:
        endpoint.ask("failed", str(refused))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        endpoint.ask("failed", f"the harness failed: {type(error).__name__}: {error}")


main()
