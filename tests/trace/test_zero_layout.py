"""Who owns which gradient under ZeRO-2."""

from __future__ import annotations

from hfopt.trace.zero import FlatLayout


def test_a_weight_over_a_border_is_kept_whole_by_both_neighbours() -> None:
    assert FlatLayout([[6, 4]], 2).largest_kept == 10  # parts of 5: rank 0 keeps the 6, rank 1 both
    assert FlatLayout([[5, 5]], 2).largest_kept == 5


def test_groups_are_divided_on_their_own() -> None:
    assert FlatLayout([[8], [2, 2]], 2).largest_kept == 8 + 2


def test_a_bucket_is_cut_where_the_owner_changes() -> None:
    layout = FlatLayout([[4, 4, 4, 4], [1, 1]], 2)
    assert layout.pieces([(0, 3), (0, 2)]) == 1
    assert layout.pieces([(0, 3), (0, 1)]) == 2
    assert layout.pieces([(0, 3), (1, 0), (0, 2)]) == 3


def test_the_largest_piece_one_rank_owns_of_a_weight() -> None:
    assert FlatLayout([[7, 9]], 2).largest_pieces([(0, 0), (0, 1)]) == [7, 8]
    assert FlatLayout([[100]], 8).largest_pieces([(0, 0)]) == [13]
    assert FlatLayout([[3], []], 8).largest_pieces([(0, 0)]) == [1]
