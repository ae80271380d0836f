"""``python -m mayfly_worker --settings JSON``: one worker process, spawned by a reaper."""

import argparse

from mayfly_protocol.settings import worker_settings
from mayfly_worker.service.process import main

parser = argparse.ArgumentParser(prog="mayfly_worker", description=__doc__)
parser.add_argument("--settings", required=True, help="WorkerSettings as JSON")
main(worker_settings.validate_json(parser.parse_args().settings))
