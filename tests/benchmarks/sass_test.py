"""What benchmarks/kernels/sass.py makes of a loop as cuobjdump prints it, and of rows of its table."""

import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks" / "kernels"))

import bounds  # noqa: E402
import sass  # noqa: E402

# A loop of one pack of four floats: a slow way by a call, a tail, and a load on a condition.
LOOP = """
  Function : loop_kernel
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA 0x60 ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/               @P1 LDG.E.128 R8, desc[UR4][R6.64] ;
        /*0040*/                   MUFU.RCP R0, R4 ;
        /*0050*/                   BRA 0x80 ;
        /*0060*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0070*/                   BRA 0x80 ;
        /*0080*/              @!P2 BRA 0xb0 ;
        /*0090*/                   CALL.REL.NOINC 0x200 ;
        /*00a0*/                   BRA 0xc0 ;
        /*00b0*/                   F2F.F64.F32 R6, R4 ;
        /*00c0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00d0*/               @P3 BRA 0x10 ;
        /*00e0*/                   EXIT ;
        /*00f0*/                   BRA 0xf0;
"""


class Parsing(unittest.TestCase):
    def test_instructions(self):
        loop = sass.parse_sass(LOOP)["loop_kernel"]
        self.assertEqual([one.address for one in loop], [16 * i for i in range(len(loop))])
        self.assertEqual((loop[1].predicate, loop[1].opcode, loop[1].target()), ("@!P0", "BRA", 0x60))

    def test_a_function_without_end_stops_nothing(self):
        self.assertEqual(sass.parse_sass("\tFunction : nothing\n"), {"nothing": []})


class TheWayRound(unittest.TestCase):
    def setUp(self):
        self.graph = sass.Graph(sass.parse_sass(LOOP)["loop_kernel"])

    def test_is_that_of_whole_packs_without_a_call(self):
        way = sass.pack_loop(self.graph, smallest=8)
        self.assertEqual([one.address for one in way],
                         [0x10, 0x20, 0x30, 0x40, 0x50, 0x80, 0xb0, 0xc0, 0xd0])
        self.assertEqual(sass.loaded(way), 16)  # not what is loaded on a condition

    def test_a_loop_that_only_reads_is_not_that_of_a_kernel_that_writes(self):
        graph = sass.Graph(sass.parse_sass(LOOP.replace("STG.E.128 desc[UR4][R2.64], R4", "NOP"))["loop_kernel"])
        self.assertIsNotNone(sass.pack_loop(graph, smallest=8))
        self.assertIsNone(sass.pack_loop(graph, smallest=8, is_written=True))

    def test_there_is_none_where_no_pack_is_wide_enough(self):
        self.assertIsNone(sass.pack_loop(self.graph, smallest=32))

    def test_a_call_on_a_condition_leaves_the_loop(self):
        text = LOOP.replace("@P3 BRA 0x10 ;", "@P3 CALL.REL.NOINC 0xf0 ;").replace("EXIT ;", "BRA 0x10 ;")
        way = sass.pack_loop(sass.Graph(sass.parse_sass(text)["loop_kernel"]), smallest=8)
        self.assertEqual([one.address for one in way][-3:], [0xc0, 0xd0, 0xe0])

    def test_classes(self):
        way = sass.pack_loop(self.graph, smallest=8)
        self.assertEqual([sass.class_of(one) for one in way],
                         ["control", "memory", "memory", "special", "control", "control", "fp64", "memory",
                          "control"])


class Rows(unittest.TestCase):
    SUMMARY = {"kernel": "summary float", "sm": "90", "registers": 38, "stack": 0, "local": 0, "shared": 1408, "wide_loads": 4,
               "bytes": 4, "instructions": 3.88, "fp64": 0.12}
    NO_LOOP = {"kernel": "update_scale", "sm": "90", "registers": 12, "stack": 0, "local": 0, "shared": 0, "wide_loads": 0, "bytes": 0}

    def test_a_table_can_be_read(self):
        read = {row["kernel"]: row for row in sass.rows_of_table(sass.table_of([self.SUMMARY, self.NO_LOOP]))}
        self.assertEqual(list(read), ["summary float", "update_scale"])
        self.assertEqual((read["summary float"]["instructions"], read["summary float"]["fp64"]), (3.88, 0.12))
        self.assertNotIn("instructions", read["update_scale"])

    def test_a_bound_is_the_slowest_resource(self):
        row = dict(self.SUMMARY, fp64=1.0)
        card = bounds.Card("90", 100, 1.0, 1000.0, fp64=2)
        times = bounds.times_of(row, card)  # picoseconds an element
        self.assertAlmostEqual(times["memory"], 4.0)
        self.assertAlmostEqual(times["fp64"], 5.0)
        self.assertAlmostEqual(times["issue"], 3.88 / 12.8)
        self.assertEqual(bounds.bound_of(row, card), ("fp64", 1.25))
        row = dict(self.SUMMARY, integer=64.0, fp64=0)
        self.assertEqual(bounds.bound_of(row, card), ("integer", 2.5))


class Goals(unittest.TestCase):
    def test_what_is_missed_is_named(self):
        good = {"kernel": "Adam half", "sm": "90", "stack": 0, "local": 0, "instructions": 39.1}
        carry = dict(good, kernel="summary float", instructions=3.9, fp64=0.125)
        self.assertEqual(list(sass.missed_goals([good, carry])), [])
        for changed in (dict(good, local=3), dict(good, stack=8), dict(good, instructions=41), dict(good, fp64=0.25),
                        dict(carry, fp64=2), dict(carry, instructions=7)):
            self.assertEqual(len(list(sass.missed_goals([changed]))), 1, changed)

    def test_doubles_may(self):
        row = {"kernel": "Adam double", "sm": "90", "stack": 0, "local": 0, "instructions": 60, "fp64": 27}
        self.assertEqual(list(sass.missed_goals([row])), [])


class Names(unittest.TestCase):
    def kernel(self, arguments, name="optimizer_step_kernel"):
        return sass.kernel_of(f"void mezzo::v0_cuda::detail::cuda::{name}<{arguments}>(mezzo::Table<1>, int)")

    def test_bytes_that_an_element_moves(self):
        table = ", mezzo::v0_cuda::detail::StepTable<StepTableRow, mezzo::v0_cuda::detail::AdamConstants, 300>"
        adam = "mezzo::v0_cuda::detail::AdamRule<false>"
        for arguments, title, read, written in [
                (f"float, {adam}, PlainWeights<float>", "Adam float", 16, 12),
                (f"double, {adam}, PlainWeights<double>", "Adam double", 32, 24),
                (f"c10::Half, {adam}, PlainWeights<c10::Half>", "Adam half", 10, 6),
                (f"c10::BFloat16, {adam}, SplitWeights", "Adam bfloat16 split", 16, 12),
                (f"c10::BFloat16, {adam}, StochasticWeights", "Adam bfloat16 stochastic", 10, 6)]:
            kernel = self.kernel(arguments + table)
            self.assertEqual((kernel.title, kernel.loaded, kernel.stored), (title, read, written))

    def test_moments_in_blocks(self):
        self.assertEqual(self.kernel("c10::BFloat16", "adamw8bit_kernel").title, "AdamW8bit bfloat16")

    def test_summaries(self):
        summary = self.kernel("c10::Half", "summary_kernel")
        self.assertEqual((summary.title, summary.loaded), ("summary half", 2))


if __name__ == "__main__":
    unittest.main()
