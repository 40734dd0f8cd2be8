import json
import os


class EvaluationTracker:
    date_id = "today"

    def __init__(self, output_path):
        self.folder = os.path.join(output_path, "model")

    def write(self, name, content):
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            json.dump(content, file)

    def save_results_aggregated(self, results, samples):
        self.write("results_today.json", results)

    def save_results_samples(self, task_name, samples):
        self.write(f"samples_{task_name}_today.jsonl", samples)
