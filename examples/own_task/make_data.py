import json
import random

pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 > 9]
random.Random(0).shuffle(pairs)
for name, chosen in (("train.jsonl", pairs[:1000]), ("test.jsonl", pairs[1000:1200])):
    with open(name, "w") as file:
        for a, b in chosen:
            row = {
                "question": f"{a}+{b}=",
                "in_words": f"What is {a} + {b}? Answer with only the number.",
                "answer": a + b,
            }
            file.write(json.dumps(row) + "\n")
