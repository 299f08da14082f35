"""llm: the command, with the gateway as one of its extra models."""

import json
import os
import subprocess
import sys
from pathlib import Path

url, model = sys.argv[1:3]
folder = Path(os.environ["LLM_USER_PATH"])
entry = {"model_id": "swarm", "model_name": model, "api_base": url + "/v1", "api_key_name": "swarm"}
(folder / "extra-openai-models.yaml").write_text(
    json.dumps([{**entry, "supports_tools": True, "supports_schema": True}])
)
(folder / "keys.json").write_text(json.dumps({"swarm": "none"}))


def llm(*arguments):
    done = subprocess.run([sys.executable, "-m", "llm", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


assert llm("-m", "swarm", "Say: All is well.") == "All is well."
assert llm("-m", "swarm", "--no-stream", "Say: All is well.") == "All is well."
if "--tools" in sys.argv:
    function = "def weather(city: str) -> str:\n    return 'sunny in ' + city"
    asked = ("-m", "swarm", "--functions", function, "What is the weather in Rome?")
    assert llm(*asked) == "The tool says: sunny in Rome"
    assert json.loads(llm("-m", "swarm", "--schema", "people int", 'Say: {"people": 3}')) == {"people": 3}
