import re


def compute_score(data_source, solution_str, ground_truth, extra_info):
    numbers = re.findall(r"-?\d+", solution_str)
    right = bool(numbers) and int(numbers[-1]) == ground_truth
    return {"score": float(right), "acc": right, "has_number": float(bool(numbers))}
