"""The process that runs a program which is tested: loads it and does what `examiner.Candidate` asks, one line of JSON each.

``python -c <this text> <descriptor of the questions> <descriptor of the answers>``
"""

import json
import os
import sys

MARKS: dict = {"l": list, "t": tuple, "s": set, "f": frozenset}
PLAIN: tuple = (bool, int, float, str)
# Objects that stay here; the examiner names them by number.
kept: list = []


def encode(x):
    """``x`` as JSON: numbers, text and containers by value, in plain types, anything else by number."""
    for plain in PLAIN:
        if isinstance(x, plain):
            return x if type(x) is plain else plain(x)
    if x is None:
        return None
    for mark, kind in MARKS.items():
        if isinstance(x, kind):
            return {mark: [encode(y) for y in x]}
    if isinstance(x, dict):
        return {"d": [[encode(k), encode(v)] for k, v in x.items()]}
    if isinstance(x, (bytes, bytearray)):
        return {"b": x.hex()}
    if isinstance(x, complex):
        return {"c": [x.real, x.imag]}
    if type(x).__module__ == "numpy" and hasattr(x, "tolist"):
        return encode(x.tolist())
    kept.append(x)
    return {"h": len(kept) - 1}


def decode(x):
    if not isinstance(x, dict):
        return x
    ((mark, y),) = x.items()
    if mark in MARKS:
        return MARKS[mark](map(decode, y))
    if mark == "d":
        return {decode(k): decode(v) for k, v in y}
    if mark == "b":
        return bytes.fromhex(y)
    return complex(*y) if mark == "c" else kept[y]


def load(source):
    space: dict = {"__name__": "solution"}
    exec(compile(source, "solution.py", "exec"), space)
    return {name: value for name, value in space.items() if not name.startswith("__") and type(value) is not type(sys)}


DO: dict = {
    "load": load,
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda x, index: x[index],
    "contains": lambda x, item: item in x,
    "len": len,
    "iter": list,
    "bool": bool,
    "str": str,
    "repr": repr,
}


def answer(line):
    what, values = json.loads(line)
    values = decode(values)
    before = encode(values[1]) if what == "call" else None
    try:
        reply = {"value": encode(DO[what](*values))}
        if what == "call":
            after = encode(values[1])
            if after != before:
                reply["args"] = after
        return json.dumps(reply)
    except BaseException as error:  # noqa: BLE001  whatever the program raises is an answer
        return json.dumps({"raised": [type(error).__name__, str(error)[:500]]})


def main():
    sys.set_int_max_str_digits(0)
    ask, tell = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
    for line in ask:
        tell.write(answer(line) + "\n")
        tell.flush()


if __name__ == "__main__":
    main()
