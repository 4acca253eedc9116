//! Weights from neighbours of which one is away for a while.
//!
//! Tests begin in the order of their names. This file has a name that sorts first, because its test
//! waits for minutes: the other tests run meanwhile.

use crate::support::up::{Household, medium};
use crate::support::*;
use crate::weights::{ALL, founded, genuine, needed};

#[test]
fn a_home_fetches_from_the_neighbours_that_are_there_and_waits_for_the_rest() {
    let (attic, first) = founded(&medium(6));
    // The founder serves the first three of six layers, this home the next two.
    let cellar = Household::new(30, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    assert_eq!(cellar.until_serving(&second), (3, 4));
    let (code, address) = (first.code().to_owned(), first.address.clone());
    first.kill();
    // All six do not fit into its memory.
    until("it says what would help", || {
        second.said().contains("it has memory for 2 of them")
    });

    // Only the founder has layer 2.
    let shed = Household::new(ALL, &[&second.address, &address]).holding(5);
    let third = shed.up(&["--join", &code]);
    until("it says what is missing", || {
        third.said().contains("no source has the missing")
    });
    assert_eq!(
        shed.serving(),
        None,
        "it serves layers without their weights"
    );
    let before = genuine(&shed);
    assert!(before > 0 && second.sent() >= before, "{}", third.said());

    let first = attic.up_at(&address, &[]);
    shed.until_serving(&third);
    let (needed, sent) = (needed(&shed, 5), first.sent() + second.sent());
    assert!(sent * 100 <= needed * 102, "{sent} for {needed}");
    genuine(&shed);
}
