//! Any sequence of messages: the limits hold, and no resources leak.

use super::*;

#[derive(Debug, Clone)]
enum Act {
    Open {
        caller: usize,
        stream: u32,
        epoch: u32,
        positions: u32,
    },
    Step {
        caller: usize,
        stream: u32,
        epoch: u32,
        at: u32,
        rows: u32,
        bad: u8,
    },
    Truncate {
        caller: usize,
        stream: u32,
        position: u32,
        answer: bool,
    },
    Close {
        caller: usize,
        stream: u32,
        epoch: u32,
    },
    Drop {
        caller: usize,
    },
    Turn,
    Pass {
        secs: u64,
    },
    Read {
        caller: usize,
    },
}

fn any_act() -> impl Strategy<Value = Act> {
    let caller = 0usize..3;
    let (stream, epoch) = (1u32..4, 1u32..4);
    prop_oneof![
        4 => (caller.clone(), stream.clone(), epoch.clone(), 0u32..300).prop_map(
            |(caller, stream, epoch, positions)| Act::Open { caller, stream, epoch, positions }),
        8 => (caller.clone(), stream.clone(), epoch.clone(), 0u32..40, 0u32..80, 0u8..20).prop_map(
            |(caller, stream, epoch, at, rows, bad)| Act::Step { caller, stream, epoch, at, rows, bad }),
        1 => (caller.clone(), stream.clone(), 0u32..40, any::<bool>()).prop_map(
            |(caller, stream, position, answer)| Act::Truncate { caller, stream, position, answer }),
        2 => (caller.clone(), stream, epoch).prop_map(
            |(caller, stream, epoch)| Act::Close { caller, stream, epoch }),
        1 => caller.clone().prop_map(|caller| Act::Drop { caller }),
        6 => Just(Act::Turn),
        1 => (0u64..700).prop_map(|secs| Act::Pass { secs }),
        3 => caller.prop_map(|caller| Act::Read { caller }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The limits hold at every moment, every answer is for a stream epoch that was opened, and at
    /// the end no resources are held.
    #[test]
    fn limits_hold_and_nothing_leaks_under_any_sequence_of_messages(
        acts in proptest::collection::vec(any_act(), 1..120),
        checkpoints in prop_oneof![Just(0u32), Just(7)],
    ) {
        // Capacity for 400 positions, so that the KV budget is reached as well.
        let budget = 4000;
        let mut host = Host::with_budget(budget);
        host.probe.checkpoints.store(checkpoints, Ordering::SeqCst);
        let mut callers: Vec<_> = (0..3).map(|peer| host.caller(peer)).collect();
        for act in acts {
            match act {
                Act::Open { caller, stream, epoch, positions } => {
                    callers[caller].tell(open_with(stream, epoch, |o| o.max_positions = positions));
                }
                Act::Step { caller, stream, epoch, at, rows: count, bad } => {
                    let mut step = Step { epoch, ..step_of(stream, at, &rows(count)) };
                    match bad {
                        0 => step.width = 3,
                        1 => step.data = encode(&vec![[f32::NAN; 4]; count as usize]),
                        2 if count > 0 => {
                            step.data = encode(&vec![[OVERFLOWS; 4]; count as usize]);
                        }
                        _ => {}
                    }
                    callers[caller].tell(Message::Step(step));
                }
                Act::Truncate { caller, stream, position, answer } => {
                    let truncate = if answer { truncate_and_tell } else { truncate };
                    callers[caller].tell(truncate(stream, position));
                }
                Act::Close { caller, stream, epoch } => callers[caller].tell(close(stream, epoch)),
                Act::Drop { caller } => callers[caller] = host.caller(caller as u8),
                Act::Turn => {
                    host.take_in();
                    host.scheduler.turn();
                }
                Act::Pass { secs } => host.clock.advance(Duration::from_secs(secs)),
                Act::Read { caller } => {
                    for message in callers[caller].sink.take() {
                        let fits = match &message {
                            Message::StepResult(r) => r.data.len() as u32 == r.rows * WIDTH * 2,
                            Message::StreamOpened(_) | Message::StreamError(_) => true,
                            Message::Truncated(_) => true,
                            _ => false,
                        };
                        prop_assert!(fits, "{message:?}");
                    }
                }
            }
            let stats = host.stats();
            prop_assert!(stats.streams <= STREAMS);
            prop_assert!(stats.kv_bytes <= budget);
            prop_assert!(host.probe.kv_bytes.load(Ordering::SeqCst) <= budget);
        }
        drop(callers);
        host.run();
        host.assert_empty();
    }
}
