//! Hosts of a model with per-layer inputs, which each host gets for its own layers. The model is small
//! and has random weights.

use super::recurrent::long_answer;
use super::*;

/// Hosts, two of each range; the first layer is private.
const RANGES: [&str; 4] = ["1-1", "1-1", "2-5", "2-5"];

#[test]
fn a_killed_host_of_a_model_with_layer_inputs_costs_no_token() {
    let caller = Caller::with_layer_inputs((1, 0));
    let (request, undisturbed) = long_answer(&caller, |seed| request(QUESTION, seed));
    let scene = Scene {
        caller,
        request,
        undisturbed,
    };
    let mut fleet = Fleet(RANGES.map(|range| scene.caller.host(range, &[])).into());
    for (victim, position) in [(0, 0), (0, 17), (1, 0), (1, 17), (1, TOKENS - 2)] {
        let what = format!("host {victim} at token {position}");
        let mut struck = String::new();
        let (_, heard) = scene.ask(&fleet.addresses(), false, &what, |token, route| {
            if token == position {
                struck.clone_from(&route[victim]);
                fleet.strike(&struck, Fault::Kill);
            }
        });
        assert_eq!(heard.degraded.len(), 1, "{what}");
        let place = fleet.place(&struck);
        fleet.0[place] = scene.caller.host(RANGES[place], &[]);
    }
    // Without a spare, this machine continues with the rows that it has kept.
    let pair = [fleet.0[0].address.clone(), fleet.0[2].address.clone()];
    let (_, heard) = scene.ask(&pair, true, "fallback", |token, route| {
        if token == 20 {
            fleet.strike(&route[1], Fault::Kill);
        }
    });
    assert!(heard.local);
}
