//! Hosts of recurrent layers, whose states cannot be cut at any position. The model is small and
//! has random weights.

use hearthnet_tokens::ChatMessage;

use super::*;
use crate::support::caller::conversation;

/// First of these requests with an answer of all tokens, and that answer: with random weights, any
/// token may end it.
pub(super) fn long_answer(
    caller: &Caller,
    request: impl Fn(u64) -> ChatRequest,
) -> (ChatRequest, Done) {
    let asked = (0..100).map(|seed| {
        let request = request(seed);
        let done = caller.alone(&request);
        (request, done)
    });
    let is_long = |(_, done): &(_, Done)| done.token_ids.len() as u32 == TOKENS;
    asked.into_iter().find(is_long).expect("a long answer")
}

/// The usual question, with this many private layers.
fn scene(private: (u32, u32)) -> Scene {
    let caller = Caller::recurrent(private);
    let (request, undisturbed) = long_answer(&caller, |seed| request(QUESTION, seed));
    Scene {
        caller,
        request,
        undisturbed,
    }
}

#[test]
fn a_killed_host_of_recurrent_layers_costs_no_token() {
    let scene = scene((2, 0));
    for fault in [Fault::Kill, Fault::KillEngine] {
        matrix_of(&scene, fault, &[0, 1, 17, TOKENS - 1, TOKENS]);
    }
}

#[test]
#[ignore = "takes minutes: every host, every token, every fault"]
fn the_whole_fault_matrix_gives_the_same_answer_with_recurrent_layers() {
    let positions: Vec<u32> = (0..=TOKENS).collect();
    let scene = scene((2, 0));
    for fault in [Fault::Kill, Fault::KillEngine, Fault::Stop] {
        matrix_of(&scene, fault, &positions);
    }
}

#[test]
fn without_a_spare_an_answer_of_recurrent_layers_continues_locally() {
    continues_locally(&scene((2, 1)), &[0, 20]);
}

/// A second turn without the first answer goes back before it: with private layers to a checkpoint
/// of them; otherwise each host says how far it went back, and gets the rows in between again.
#[test]
fn a_turn_that_drops_the_last_answer_is_the_same_despite_a_killed_host() {
    for private in [(2, 0), (0, 0)] {
        let scene = scene(private);
        let caller = &scene.caller;
        let (next, expected) = long_answer(caller, |seed| {
            let messages = vec![
                ChatMessage::user(QUESTION),
                ChatMessage::assistant("I know none."),
                ChatMessage::user("Then tell me about the sea, the wind and the stars."),
            ];
            conversation(messages, seed)
        });
        let mut fleet = Fleet::new(caller, 2);
        for kill in [None, Some((0, 0)), Some((1, 0)), Some((0, 3)), Some((1, 3))] {
            let what = format!("{private:?} private, host and token {kill:?}");
            let mut conversation = scene.open(&fleet.addresses(), false);
            scene.ask_in(&mut conversation, &what, |_, _| {});
            let mut struck = None;
            let (done, heard) = caller.same_answer(
                &mut conversation,
                &next,
                &expected,
                &what,
                |token, route| {
                    if let Some((victim, position)) = kill
                        && token == position
                    {
                        fleet.strike(&route[victim], Fault::Kill);
                        struck = Some(route[victim].clone());
                    }
                },
            );
            let (cached, before) = (done.usage.cached_tokens, scene.undisturbed.usage);
            match private {
                (0, 0) => assert!(cached >= before.prompt_tokens, "{what}: {cached}"),
                _ => assert!(cached > 0 && cached.is_multiple_of(64), "{what}: {cached}"),
            }
            assert_eq!(heard.degraded.len(), usize::from(kill.is_some()), "{what}");
            if let Some(struck) = struck {
                fleet.mend(caller, &struck, Fault::Kill);
            }
        }
    }
}
