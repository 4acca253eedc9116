//! Callers that give up, and chats that wait beside others.

use super::*;

/// Cancels a call while a host does not answer the step for a position, after `sent` steps. The
/// host then receives the end of the stream, and no further message.
fn given_up(span: usize, position: u32, prompt: &[u32], sent: u32) {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    let host = &stage.hosts[span];
    host.at(position, Deed::Mute);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let result = stage.call(&mut backend, prompt, 12, &mut Heard::default());
            drop(backend);
            result
        });
        stage.until("the steps that are not answered", || {
            let state = host.state();
            state.deeds.is_empty() && state.steps == sent
        });
        stage.cancel.cancel();
        assert_eq!(call.join().unwrap(), Err(ChatError::Cancelled));
    });
    stage.until_empty();
    assert_eq!(host.state().steps, sent, "span {span}, position {position}");
    assert!(stage.hosts.iter().all(|host| host.state().late == 0));
}

#[test]
fn cancelling_in_mid_answer_ends_the_wait_and_frees_every_host() {
    // Three chunks of the prompt and two rows of the answer.
    for span in [0, 1] {
        given_up(span, 9, &PROMPT, 5);
    }
}

#[test]
fn of_a_long_prompt_that_is_given_up_no_further_piece_is_sent() {
    let long: Vec<u32> = (0..300).map(|n| n % 11).collect();
    for span in [0, 1] {
        for pieces in [0, 50] {
            // The unanswered chunk, and the one that waits behind it.
            given_up(span, 3 * pieces, &long, pieces + 2);
        }
    }
}

#[test]
fn giving_up_ends_a_pause_for_room() {
    let stage = Stage::new(&[(0, 3)]);
    let mut backend = stage.open();
    stage.hosts[0].at(9, Deed::Preempt);
    stage.hosts[0].state().refusals = vec!["kv_full"; 1000];
    std::thread::scope(|scope| {
        let call = scope.spawn(|| stage.call(&mut backend, &PROMPT, 12, &mut Heard::default()));
        stage.until("some refusals", || {
            stage.hosts[0].state().refusals.len() < 998
        });
        stage.cancel.cancel();
        assert_eq!(call.join().unwrap(), Err(ChatError::Cancelled));
    });
}

#[test]
fn a_chat_that_waits_for_a_host_does_not_hold_up_another_on_the_same_session() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut stuck = stage.open();
    stage.hosts[1].at(9, Deed::Mute);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let result = stage.call(&mut stuck, &PROMPT, 12, &mut Heard::default());
            drop(stuck);
            result
        });
        stage.until("the step that is not answered", || {
            stage.hosts[1].state().deeds.is_empty()
        });
        stage.answer(&mut stage.open(), 12);
        stage.cancel.cancel();
        assert_eq!(call.join().unwrap(), Err(ChatError::Cancelled));
    });
    stage.until_empty();
}
