//! Hosts that leave, fail, stall, or return wrong rows.

use proptest::prelude::*;

use super::*;

#[test]
fn a_sequence_moves_off_a_host_that_leaves_and_nothing_has_failed() {
    // In the first chunk of the prompt, in its last, and in the answer.
    for span in [0, 1] {
        for position in [0, 7, 8, 15] {
            let (_, heard, now) = with_deed(span, position, Deed::Leave);
            assert_eq!(heard.degraded, [""; 0], "span {span}, position {position}");
            assert_eq!(heard.moves.len(), 1);
            assert_eq!(heard.moves[0].0, "leaving");
            assert!(now.contains(&heard.moves[0].1[0]));
        }
    }
}

#[test]
fn a_caller_with_private_layers_gets_every_row_once_despite_host_failures() {
    // Rows in parts, layers 1 and 2 of 4 on hosts; output of each position.
    let prompt: Vec<u32> = (0..20).map(|n| n * 37 % 101).collect();
    let expected: Vec<u32> = prompt.iter().copied().map(honest(1..3)).collect();
    let deeds = [Deed::Die, Deed::Leave, Deed::Preempt];
    for (span, position, deed) in (0..2).flat_map(|span| {
        [0, 7, 13, 19]
            .map(|at| deeds.map(|deed| (span, at, deed)))
            .concat()
    }) {
        let stage = Stage::new(&HALVES);
        let mut backend = stage.open_between(1..3, in_pieces_of(3)).unwrap();
        let node = stage.runs(&backend, span).node();
        stage.host(&node).at(position, deed);
        backend.begin_call(0);
        let mut run = Run {
            cancel: &stage.cancel,
            notify: &mut |_| {},
        };
        let (mut at, mut got) = (0, Vec::new());
        // A prompt of twelve in parts of four, one of seven at once, one row.
        for (length, part) in [(12, 4), (7, 7), (1, 1)] {
            let mut left = length;
            for values in prompt[at..at + length].chunks(part) {
                let rows = rows(values);
                left -= values.len();
                let part = Rows {
                    position: (at + length - left - values.len()) as u32,
                    values: &rows,
                    more: left as u32,
                    all: false,
                };
                chat_loop::block_on(backend.submit(part, run.cancel));
            }
            let out = chat_loop::block_on(backend.output(&mut run)).unwrap();
            got.extend(out.chunks_exact(WIDTH).map(|row| row[0] as u32));
            at += length;
        }
        assert_eq!(got, expected, "{deed:?} of host {span} at {position}");
    }
}

#[test]
fn a_preempted_sequence_restarts_without_a_failover_frame() {
    for span in [0, 1] {
        for position in [0, 7, 8, 15] {
            let (_, heard, _) = with_deed(span, position, Deed::Preempt);
            assert!(heard.degraded.is_empty() && heard.moves.is_empty());
        }
    }
}

/// Stage with three hosts for the first half; the preferred one spoils every answer.
fn with_spoiler(spoil: fn(&mut StepResult)) -> (Stage, String) {
    let stage = Stage::new(&[(0, 1), (0, 1), (0, 1), (2, 3)]);
    let preferred = stage.runs(&stage.open(), 0).node();
    stage.host(&preferred).state().spoils = Some(spoil);
    (stage, preferred)
}

#[test]
fn a_host_that_always_returns_nan_spoils_one_of_five_chats() {
    let (stage, liar) = with_spoiler(|result| result.data = vec![0xff; result.data.len()].into());
    let expected = undisturbed(&[(&[5, 6, 7], 4)]);
    let mut degraded = Vec::new();
    for _ in 0..5 {
        let heard = stage.ended(&mut stage.open(), &[5, 6, 7], 4);
        assert_eq!(heard.outputs, expected);
        degraded.extend(heard.degraded);
    }
    assert_eq!(degraded, ["tensor_nonfinite"]);
    let told = stage.health_of(&liar);
    assert_eq!(told.standing, Standing::Quarantined);
    assert!(told.quarantine_ms > 0);
    let worth = told.failures[&FailureKind::Corruption];
    assert!(worth > 0.9 && worth <= 1.0, "{worth}");
    // If no other host has its layers, the quarantined host is used.
    let mut stage = stage;
    let second = stage.hosts[3].node();
    let is_left =
        |link: &Arc<HostLink>| [&liar, &second].contains(&&link.descriptor.host.to_string());
    stage.links.retain(is_left);
    assert_eq!(stage.runs(&stage.open(), 0).node(), liar);
}

#[test]
fn a_host_that_returns_the_same_rows_for_other_rows_is_found_out() {
    let (stage, liar) = with_spoiler(|result| {
        let one = row(7).into_iter().flat_map(f32::to_le_bytes);
        let one: Vec<u8> = one.collect();
        result.data = one.repeat(result.rows as usize).into();
    });
    let heard = stage.ended(&mut stage.open(), &[5, 6, 7], 4);
    assert_eq!(heard.outputs, undisturbed(&[(&[5, 6, 7], 4)]));
    assert_eq!(heard.degraded, ["tensor_band"]);
    assert_eq!(stage.health_of(&liar).standing, Standing::Quarantined);
}

#[test]
fn the_same_conversation_again_and_its_beginning_in_another_are_no_repeats() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    for prompt in [&[5, 6, 7][..], &[5, 6, 7], &[5, 6, 8, 7], &[5, 5, 5, 5, 5]] {
        let heard = stage.ended(&mut stage.open(), prompt, 6);
        assert_eq!(heard.degraded, [""; 0]);
    }
}

#[test]
fn a_slow_host_is_left_to_others_by_the_next_chat() {
    // 20 ms per step, where others take much less.
    let (stage, slow) = with_spoiler(|_| std::thread::sleep(Duration::from_millis(20)));
    let mut heard = vec![stage.ended(&mut stage.open(), &[5, 6, 7], 12)];
    // The spares are unmeasured, but the host of the other layers is a reference.
    let mut asked = Vec::new();
    for _ in 0..4 {
        let mut backend = stage.open();
        asked.push(stage.runs(&backend, 0).node());
        heard.push(stage.ended(&mut backend, &[5, 6, 7], 12));
    }
    assert!(!asked.contains(&slow), "{slow}: {asked:?}");
    let speed = stage.health_of(&slow).shards[0].p50_ms;
    assert!(speed >= 10.0, "20 ms through two layers");
    for heard in heard {
        assert_eq!(heard.degraded, [""; 0]);
    }
}

#[test]
fn a_host_whose_models_numbers_overflow_is_not_banned() {
    let stage = Stage::new(&[(0, 3), (0, 3)]);
    for host in &stage.hosts {
        host.state().refusals.extend(["boundary_overflow"; 2]);
    }
    assert!(stage.open_with(PumpSettings::default()).is_err());
    stage.all_are_good();
}

#[test]
fn a_leaving_host_without_replacement_works_to_the_end() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    stage.hosts[1].at(9, Deed::Leave);
    let heard = stage.answer(&mut backend, 12);
    assert!(heard.degraded.is_empty() && heard.moves.is_empty());
    // The call has ended: the idle stream does not delay the host's shutdown.
    stage.until("the leaving host is free", || {
        stage.hosts[1].open_streams() == 0
    });
    assert!(!backend.is_alive());
}

#[test]
fn a_conversation_that_rests_lets_a_leaving_host_go_and_goes_on_elsewhere() {
    let stage = Stage::new(&HALVES);
    let mut backend = stage.open();
    let mut heard = stage.answer(&mut backend, 4);
    let first = stage.runs(&backend, 0);
    let second = stage.runs(&backend, 1);
    Puppet::leave(&mut first.state());
    stage.until("it goes", || first.open_streams() == 0);
    assert_eq!(second.open_streams(), 1, "only what leaves is let go");
    assert!(!backend.is_alive());
    // The next call gives the same output.
    stage.call(&mut backend, &[7, 7], 4, &mut heard).unwrap();
    assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, 4), (&[7, 7], 4)]));
    assert!(heard.degraded.is_empty());
    assert_eq!(heard.moves.len(), 1);
}

#[test]
fn a_host_that_is_there_and_does_nothing_is_left_for_a_spare() {
    // With the reference of another host, and after a few steps of its own.
    for (span, position) in [(1, 0), (0, 9), (1, 9)] {
        let (_, heard, _) = with_deed(span, position, Deed::Mute);
        assert_eq!(heard.degraded, ["degraded"], "span {span} at {position}");
        assert_eq!(heard.moves.len(), 1, "span {span} at {position}");
        assert!(heard.waits.contains(&"busy".into()), "{:?}", heard.waits);
    }
}

#[test]
fn a_host_that_answers_about_another_stream_or_epoch_has_failed_and_is_not_waited_for() {
    let lies: [fn(&mut StreamOpened); 2] =
        [|opened| opened.stream += 7, |opened| opened.epoch += 1];
    for lie in lies {
        let stage = Stage::new(&HALVES);
        let liar = stage.runs(&stage.open(), 0).node();
        stage.host(&liar).state().misnames = Some(lie);
        let mut backend = stage.open();
        stage.answer(&mut backend, 4);
        let failures = stage.health_of(&liar).failures.into_keys();
        let failures: Vec<_> = failures.collect();
        assert_eq!(failures, [FailureKind::Refused], "not `stalled`");
    }
}

/// Restarts a host each time that it has failed, until `done`.
fn revive(host: &Puppet, done: &std::sync::atomic::AtomicBool) {
    while !done.load(std::sync::atomic::Ordering::Relaxed) {
        // Not before the session has ended, so that each failure happens.
        let ended = host
            .state()
            .sessions
            .iter()
            .all(|one| one.closed().is_some());
        if ended {
            host.alive
                .send_if_modified(|alive| !std::mem::replace(alive, true));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_host_that_comes_back_is_asked_again_by_the_answer_that_lost_it() {
    // A single failure, and repeated failures caused by the prompt.
    for (deaths, left) in [(1, 0), (10, 6)] {
        let stage = Stage::new(&[(0, 1), (2, 3)]);
        let mut backend = stage.open_pooled(PumpSettings::default()).unwrap();
        for _ in 0..deaths {
            stage.hosts[1].at(9, Deed::Die);
        }
        let done = std::sync::atomic::AtomicBool::new(false);
        let mut heard = Heard::default();
        let result = std::thread::scope(|scope| {
            scope.spawn(|| revive(&stage.hosts[1], &done));
            let result = stage.call(&mut backend, &PROMPT, 12, &mut heard);
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            result
        });
        assert_eq!(stage.hosts[1].state().deeds.len(), left);
        if left > 0 {
            assert!(
                matches!(result, Err(ChatError::ShardUnavailable(_))),
                "{result:?}"
            );
            continue;
        }
        result.unwrap();
        assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, 12)]));
        let back = (Code::CONNECTION_LOST, vec![stage.hosts[1].node()]);
        assert_eq!(heard.moves, [back]);
    }
}

#[test]
fn a_new_chat_does_not_wait_for_an_offline_host_until_the_connect_timeout() {
    // It accepts connections, as a suspended process does, and sends nothing.
    let dark = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stage = Stage::new(&[]);
    let addr = HostAddr {
        endpoint: dark.local_addr().unwrap().to_string(),
        node: NodeKey::from_secret(&[1; 32]).id(),
    };
    let opened = stage.open_addresses([addr], fallback_settings());
    let why = opened.err().unwrap().to_string();
    assert!(why.ends_with("has not answered yet"), "{why}");
}

#[test]
fn rows_of_every_data_type_have_one_on_the_wire() {
    for boundary in BoundaryDtype::ALL {
        let dtype = DType::of_rows(boundary.descriptor_name()).unwrap();
        assert_eq!(dtype.size(), boundary.bytes_per_value());
    }
}

#[test]
fn hosts_that_fail_before_the_first_row_do_not_end_the_call_beside_their_spares() {
    let stage = Stage::new(&[(0, 1), (2, 3), (0, 1), (2, 3), (0, 3)]);
    for host in &stage.hosts[..4] {
        host.state().refusals = vec!["internal"; 8];
    }
    let mut backend = stage.open_with(fallback_settings()).unwrap();
    let heard = stage.answer(&mut backend, 4);
    assert_eq!(heard.degraded, [""; 0]);
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        3 => Just(Deed::Leave),
        3 => Just(Deed::Preempt),
        1 => Just(Deed::Die),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Hosts leave, fail and preempt at any step, also during replays and openings; each half has
    /// one host that stays.
    #[test]
    fn random_host_failures_do_not_change_the_output(
        deeds in proptest::collection::vec((0usize..6, 0u32..30, deed()), 0..12),
        refusals in proptest::collection::vec((0usize..6, prop_oneof![Just("preempted"), Just("shutting_down")]), 0..4),
        history_bytes in prop_oneof![Just(usize::MAX), Just(100)],
    ) {
        let stage = Stage::new(&[(0, 1), (0, 3), (2, 3), (0, 1), (2, 3), (0, 3)]);
        let mut backend = stage.open_with(PumpSettings {
            history_bytes,
            ..in_pieces_of(3)
        }).unwrap();
        for (host, position, deed) in deeds {
            // The last host may be busy, but it stays.
            if host < 5 || deed == Deed::Preempt {
                stage.hosts[host].at(position, deed);
            }
        }
        for (host, code) in refusals {
            if host < 5 {
                stage.hosts[host].state().refusals.push(code);
            }
        }
        let mut heard = stage.ended(&mut backend, &PROMPT, 6);
        stage.call(&mut backend, &[8, 8], 10, &mut heard).unwrap();
        prop_assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, 6), (&[8, 8], 10)]));
        drop(backend);
        stage.until_empty();
    }
}
