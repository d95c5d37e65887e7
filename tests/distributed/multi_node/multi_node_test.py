"""Four ranks on two nodes over Gloo: multi_node_test.py RESTART_PROGRAM. Exits with 77 if network namespaces are not permitted."""
import sys
import tempfile
import time
import unittest

from nodes import Nodes, unavailable_reason

PROGRAM = ""
TIMEOUT = 30   # seconds of a collective, as in restart_program.cpp
TEST_TIMEOUT = 120    # seconds until a test fails


def start_run(nodes, mode, directory, steps, ranks_per_node=2):
    return nodes.start([PROGRAM, mode, directory, str(steps)], ranks_per_node)


def get_digests(ranks):
    """Digests of the weights and per-rank tensors of each rank."""
    for rank in ranks:
        status = rank.end(TEST_TIMEOUT)
        assert status == 0, f"{status}\n{rank.text()}"
    return [[line for line in rank.lines if line.startswith(("end ", "own "))] for rank in ranks]


def run_uninterrupted(mode, steps):
    """Runs all ranks on one node."""
    with Nodes(1) as node, tempfile.TemporaryDirectory() as directory:
        return get_digests(start_run(node, mode, directory, steps, ranks_per_node=4))


class TwoNodes(unittest.TestCase):
    def test_two_nodes_match_one_node_bitwise(self):
        for mode in ("ddp", "zero"):
            expected = run_uninterrupted(mode, steps=8)
            self.assertEqual(len({lines[0] for lines in expected}), 1)
            with self.subTest(mode), Nodes(2) as nodes, tempfile.TemporaryDirectory() as directory:
                self.assertEqual(get_digests(start_run(nodes, mode, directory, steps=8)), expected)

    def test_slow_link_matches_bitwise(self):
        expected = run_uninterrupted("ddp", steps=8)
        with Nodes(2, megabits=50) as nodes, tempfile.TemporaryDirectory() as directory:
            ranks = start_run(nodes, "ddp", directory, steps=8)
            self.assertEqual(get_digests(ranks), expected)
            self.assertNotIn("mezzo:", "".join(rank.text() for rank in ranks))

    def test_link_failure_ends_all_ranks_and_run_resumes(self):
        for mode in ("ddp", "zero"):
            with self.subTest(mode), tempfile.TemporaryDirectory() as directory:
                with Nodes(2) as nodes:
                    ranks = start_run(nodes, mode, directory, steps=1_000_000)
                    ranks[0].wait_for("saved 6", TEST_TIMEOUT)
                    nodes.disconnect(1)
                    begin = time.monotonic()
                    statuses = [rank.end(TEST_TIMEOUT) for rank in ranks]
                    print(f"{mode}: all ranks exited {time.monotonic() - begin:.1f} s after the link failure, with a timeout of "
                          f"{TIMEOUT} s")
                    did = max(int(line.split()[1]) for line in ranks[0].lines if line.startswith("did "))
                self.assertNotIn(0, statuses, "\n".join(rank.text() for rank in ranks))
                expected = run_uninterrupted(mode, steps=did + 3)
                with Nodes(1) as node:
                    ranks = start_run(node, mode, directory, steps=did + 3, ranks_per_node=4)
                    self.assertEqual(get_digests(ranks), expected)
                    self.assertGreaterEqual(int(ranks[0].wait_for("from ", TEST_TIMEOUT).split()[1]), 6)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    reason = unavailable_reason()
    if reason:
        print(reason)
        sys.exit(77)
    unittest.main(verbosity=2)
