//! Streams that return to some positions only, as with recurrent layers, and tell their caller.

use crate::tests::fake::{KV_BYTES, PAGE};

use super::*;

/// Distance of checkpoints.
const EVERY: u32 = 64;

fn host_with_checkpoints(change: impl FnOnce(&mut ServeConfig)) -> (Host, Caller) {
    let mut host = Host::with_config(change);
    host.probe.checkpoints.store(EVERY, Ordering::SeqCst);
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    (host, caller)
}

/// Sends rows of `text` from position `held` on. The answer must be that of a stream that never
/// went back.
#[track_caller]
fn go_on(caller: &mut Caller, host: &mut Host, epoch: u32, text: &[[f32; 4]], held: u32) {
    let from = held as usize;
    let before = from.checked_sub(1).map_or(0.0, |last| text[last][0]);
    let answers = caller.ask(host, step_in(epoch, 1, held, &text[from..]));
    let expected = expected(before, held, &text[from..]);
    assert_eq!(result(&answers).data, encode(&expected));
}

#[test]
fn a_stream_returns_to_its_last_checkpoint_and_its_caller_replays_the_difference() {
    let (mut host, mut caller) = host_with_checkpoints(|_| {});
    let text = rows(150);
    go_on(&mut caller, &mut host, 1, &text, 0);
    for (to, kept) in [
        (150, 150),
        (149, 128),
        (128, 128),
        (127, 64),
        (10, 0),
        (0, 0),
    ] {
        let answers = caller.ask(&mut host, truncate_and_tell(1, to));
        assert_eq!(answers, [truncated(1, kept)], "to {to}");
        if kept < 150 {
            go_on(&mut caller, &mut host, 1, &text, kept);
        }
    }
}

#[test]
fn a_truncation_without_an_answer_ends_a_stream_that_cannot_return() {
    let (mut host, mut caller) = host_with_checkpoints(|_| {});
    go_on(&mut caller, &mut host, 1, &rows(150), 0);
    assert_eq!(caller.ask(&mut host, truncate(1, 128)), []);
    assert_eq!(caller.refusal(&mut host, truncate(1, 100)), "position_gap");
    host.assert_empty();
}

#[test]
fn a_truncation_beyond_the_end_is_a_fault_whether_or_not_it_is_answered() {
    let (mut host, mut caller) = host_with_checkpoints(|_| {});
    let mut code = |message| caller.refusal(&mut host, message);
    assert_eq!(code(truncate_and_tell(7, 0)), "unknown_stream");
    assert_eq!(code(truncate_and_tell(1, 1)), "position_gap");
    assert_eq!(code(truncate_and_tell(1, 0)), "stream_ended");
    host.assert_empty();
}

#[test]
fn answers_keep_their_place_between_results() {
    let (mut host, mut caller) = host_with_checkpoints(|_| {});
    caller.tell(step(1, 0, &rows(70)));
    caller.tell(truncate_and_tell(1, 65));
    caller.tell(step(1, 64, &rows(3)));
    caller.tell(truncate_and_tell(1, 67));
    host.run();
    let answers = caller.sink.take();
    let [
        Message::StepResult(first),
        one,
        Message::StepResult(second),
        other,
    ] = &answers[..]
    else {
        panic!("{answers:?}");
    };
    assert_eq!((first.rows, second.position), (70, 64));
    assert_eq!((one, other), (&truncated(1, 64), &truncated(1, 67)));
}

#[test]
fn a_stream_that_was_truncated_with_an_answer_does_not_rest() {
    let (mut host, mut caller) = host_with_checkpoints(|_| {});
    let rests = |caller: &Caller| caller.stream_table.handle_of(1).rests();
    caller.ask(&mut host, step(1, 0, &rows(3)));
    caller.ask(&mut host, truncate(1, 3));
    assert!(rests(&caller));
    caller.ask(&mut host, truncate_and_tell(1, 3));
    assert!(!rests(&caller));
}

/// Act of a conversation, or of another caller.
#[derive(Debug, Clone, Copy)]
enum Act {
    Append(u32),
    /// Returns to this share of the text, in percent.
    Return(u32),
    /// The conversation is kept for later.
    Rest,
    /// Another caller takes so many pages for a moment.
    Take(u32),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => prop_oneof![Just(1u32), 2u32..9, 20u32..90].prop_map(Act::Append),
        3 => (0u32..=100).prop_map(Act::Return),
        1 => Just(Act::Rest),
        2 => (1u32..9).prop_map(Act::Take),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A conversation has the rows of a plain replay, whatever its stream kept, and also if it was
    /// preempted meanwhile.
    #[test]
    fn conversations_that_go_back_and_are_preempted_have_the_rows_of_a_plain_replay(
        acts in proptest::collection::vec(act(), 1..30),
    ) {
        const LONGEST: u32 = 200;
        const PAGES: u32 = 13;
        let open = |stream, epoch| open_with(stream, epoch, |o| o.max_positions = LONGEST);
        let mut host = Host::with_config(|config| {
            config.kv_budget_bytes = u64::from(PAGES * PAGE) * KV_BYTES;
        });
        host.probe.checkpoints.store(EVERY, Ordering::SeqCst);
        let (mut caller, mut other) = (host.caller(1), host.caller(2));
        let (mut text, mut epoch, mut seed) = (Vec::new(), 1, 0u32);
        caller.ask(&mut host, open(1, epoch));
        for (round, act) in (1..).zip(acts) {
            let length = text.len() as u32;
            match act {
                Act::Append(count) => {
                    for _ in 0..count.min(LONGEST - length) {
                        seed += 1;
                        text.push([(seed * 7 % 50) as f32, 1.0, -2.0, 0.5]);
                    }
                    if text.len() as u32 > length {
                        go_on(&mut caller, &mut host, epoch, &text, length);
                    }
                }
                Act::Return(share) => {
                    let position = length * share / 100;
                    text.truncate(position as usize);
                    let answers = caller.ask(&mut host, truncate_in(epoch, 1, position, true));
                    let [Message::Truncated(kept)] = answers[..] else {
                        panic!("{answers:?}");
                    };
                    let kept = kept.position;
                    prop_assert!(kept == position || kept < position && kept % EVERY == 0);
                    if kept < position {
                        go_on(&mut caller, &mut host, epoch, &text, kept);
                    }
                }
                Act::Rest => {
                    let rest = truncate_in(epoch, 1, length, false);
                    prop_assert_eq!(caller.ask(&mut host, rest), []);
                }
                Act::Take(pages) => {
                    other.tell(open(1, round));
                    let rows = rows(pages * PAGE);
                    other.tell(step_in(round, 1, 0, &rows));
                    host.run();
                    other.tell(close(1, round));
                    host.run();
                    let taken = caller.sink.take();
                    if !taken.is_empty() {
                        prop_assert_eq!(codes(&taken), [(epoch, "preempted")]);
                        epoch += 1;
                        prop_assert_eq!(caller.ask(&mut host, open(1, epoch)), [opened(1, epoch)]);
                        if !text.is_empty() {
                            go_on(&mut caller, &mut host, epoch, &text, 0);
                        }
                    }
                }
            }
        }
        drop((caller, other));
        host.run();
        host.assert_empty();
    }
}
