"""Four ranks on two nodes over Gloo: multi_node_test.py RESTART_PROGRAM. Exits with 77 if network namespaces are not permitted."""
import sys
import tempfile
import time
import unittest

from nodes import Nodes, unavailable_reason

PROGRAM = ""
TIMEOUT = 30   # seconds of a collective, as in restart_program.cpp
ENOUGH = 120    # seconds until a test fails


def job(nodes, way, directory, steps, ranks_a_host=2):
    return nodes.start([PROGRAM, way, directory, str(steps)], ranks_a_host)


def digests(ranks):
    """Digests of the weights and per-rank tensors of each rank."""
    for rank in ranks:
        status = rank.end(ENOUGH)
        assert status == 0, f"{status}\n{rank.text()}"
    return [[line for line in rank.lines if line.startswith(("end ", "own "))] for rank in ranks]


def run_undisturbed(way, steps):
    """Runs all ranks on one node."""
    with Nodes(1) as host, tempfile.TemporaryDirectory() as directory:
        return digests(job(host, way, directory, steps, ranks_a_host=4))


class TwoNodes(unittest.TestCase):
    def test_two_nodes_match_one_node_bitwise(self):
        for way in ("ddp", "zero"):
            expected = run_undisturbed(way, steps=8)
            self.assertEqual(len({lines[0] for lines in expected}), 1)
            with self.subTest(way), Nodes(2) as nodes, tempfile.TemporaryDirectory() as directory:
                self.assertEqual(digests(job(nodes, way, directory, steps=8)), expected)

    def test_slow_link_matches_bitwise(self):
        expected = run_undisturbed("ddp", steps=8)
        with Nodes(2, megabits=50) as nodes, tempfile.TemporaryDirectory() as directory:
            ranks = job(nodes, "ddp", directory, steps=8)
            self.assertEqual(digests(ranks), expected)
            self.assertNotIn("mezzo:", "".join(rank.text() for rank in ranks))

    def test_link_failure_ends_all_ranks_and_run_resumes(self):
        for way in ("ddp", "zero"):
            with self.subTest(way), tempfile.TemporaryDirectory() as directory:
                with Nodes(2) as nodes:
                    ranks = job(nodes, way, directory, steps=1_000_000)
                    ranks[0].wait_for("saved 6", ENOUGH)
                    nodes.unplug(1)
                    begin = time.monotonic()
                    statuses = [rank.end(ENOUGH) for rank in ranks]
                    print(f"{way}: all ranks exited {time.monotonic() - begin:.1f} s after the link failure, with a timeout of "
                          f"{TIMEOUT} s")
                    did = max(int(line.split()[1]) for line in ranks[0].lines if line.startswith("did "))
                self.assertNotIn(0, statuses, "\n".join(rank.text() for rank in ranks))
                expected = run_undisturbed(way, steps=did + 3)
                with Nodes(1) as host:
                    ranks = job(host, way, directory, steps=did + 3, ranks_a_host=4)
                    self.assertEqual(digests(ranks), expected)
                    self.assertGreaterEqual(int(ranks[0].wait_for("from ", ENOUGH).split()[1]), 6)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    reason = unavailable_reason()
    if reason:
        print(reason)
        sys.exit(77)
    unittest.main(verbosity=2)
