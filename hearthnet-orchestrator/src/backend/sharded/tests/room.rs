//! Hosts without room, and the lengths that streams are opened for.

use super::*;

#[test]
fn a_sequence_waits_for_room_where_there_is_none_elsewhere() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    stage.hosts[1].at(10, Deed::Preempt);
    stage.hosts[1].state().refusals = vec!["kv_full", "stream_limit", "preempted"];
    let heard = stage.answer(&mut backend, 12);
    assert!(heard.degraded.is_empty() && heard.moves.is_empty());
    assert!(stage.hosts[1].state().refusals.is_empty());
}

#[test]
fn a_host_that_takes_over_may_be_full_for_a_while() {
    let stage = Stage::new(&[(0, 1), (2, 3), (2, 3)]);
    let mut backend = stage.open();
    let dies = stage.runs(&backend, 1).node();
    stage.host(&dies).at(10, Deed::Die);
    let spare = stage.hosts[1..].iter().find(|host| host.node() != dies);
    let spare = spare.unwrap();
    spare.state().refusals = vec!["stream_limit"; 3];
    let heard = stage.answer(&mut backend, 12);
    assert_eq!(heard.degraded, ["connection_lost"]);
    assert_eq!(
        heard.moves,
        [("connection_lost".into(), vec![spare.node()])]
    );
}

#[test]
fn a_sequence_does_not_wait_for_room_for_ever() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open_for(Duration::from_millis(200));
    stage.hosts[1].at(10, Deed::Preempt);
    stage.hosts[1].state().refusals = vec!["kv_full"; 1000];
    let mut heard = Heard::default();
    let error = stage.call(&mut backend, &PROMPT, 12, &mut heard);
    assert_eq!(error.unwrap_err().code(), "shard_unavailable");
    assert_eq!(heard.degraded, ["kv_full"]);
    drop(backend);
    stage.until_empty();
}

#[test]
fn answering_one_row_and_taking_the_memory_back_for_the_next_ends() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open_for(Duration::from_millis(400));
    // Only host of its layers; each action is done once, so the row is answered afterwards.
    for position in 8..500 {
        stage.hosts[1].at(position, Deed::Preempt);
    }
    let mut heard = Heard::default();
    let error = stage.call(&mut backend, &PROMPT, 400, &mut heard);
    assert_eq!(error.unwrap_err().code(), "shard_unavailable");
    assert_eq!(heard.degraded, ["preempted"]);
    assert!((1..100).contains(&heard.outputs.len()), "some rows came");
    let told = stage.health_of(&stage.hosts[1].node());
    assert!(told.failures.contains_key(&FailureKind::Refused));
    drop(backend);
    stage.until_empty();
}

#[test]
fn a_host_that_asks_for_its_memory_now_and_then_is_waited_for_and_has_not_failed() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open_for(Duration::from_millis(2000));
    for position in (10..200).step_by(20) {
        stage.hosts[1].at(position, Deed::Preempt);
    }
    let heard = stage.answer(&mut backend, 200);
    assert!(heard.degraded.is_empty());
    stage.all_are_good();
}

#[test]
fn a_new_sequence_waits_for_room_and_holds_nothing_meanwhile() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    stage.hosts[1].state().refusals = vec!["stream_limit", "kv_full", "stream_quota"];
    let mut backend = stage.open();
    assert!(stage.hosts[1].state().refusals.is_empty());
    stage.until("one stream on each", || {
        stage.hosts.iter().all(|host| host.open_streams() == 1)
    });
    // Each attempt asks the host that had room again.
    assert!(stage.hosts[0].state().asked.len() >= 4);
    let heard = stage.answer(&mut backend, 2);
    assert!(heard.degraded.is_empty() && heard.moves.is_empty());
}

#[test]
fn hosts_that_stay_full_are_told_as_full_and_not_as_missing() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    stage.hosts[1].state().refusals = vec!["stream_limit"; 1000];
    let error = stage.open_with(PumpSettings {
        start_timeout: Duration::from_millis(300),
        ..PumpSettings::default()
    });
    let error = error.err().unwrap();
    assert!(matches!(error, ChatError::HostsFull(_)), "{error}");
    assert_eq!(error.code(), "busy");
    assert!(!error.hint().contains("missing"));
    stage.until_empty();
}

#[test]
fn a_host_that_could_never_hold_a_sequence_is_passed_over_and_not_waited_for() {
    let stage = Stage::new(&[(0, 3), (0, 3)]);
    let first = stage.runs(&stage.open(), 0).node();
    stage.until_empty();
    stage.host(&first).state().refusals = vec!["kv_too_small"];
    let backend = stage.open();
    assert_ne!(stage.runs(&backend, 0).node(), first);
    drop(backend);
    for host in &stage.hosts {
        host.state().refusals = vec!["kv_too_small"; 2];
    }
    let error = stage.open_with(PumpSettings::default()).err().unwrap();
    assert_eq!(error.code(), "shard_unavailable", "{error}");
}

#[test]
fn a_host_without_room_is_passed_over_at_the_start() {
    let stage = Stage::new(&HALVES);
    let full = stage.runs(&stage.open(), 0).node();
    stage.until_empty();
    stage.host(&full).state().refusals = vec!["stream_limit"];
    let mut backend = stage.open();
    assert_ne!(stage.runs(&backend, 0).node(), full);
    assert!(stage.answer(&mut backend, 2).degraded.is_empty());
}

#[test]
fn streams_are_opened_for_the_expected_length_and_grow() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    backend.begin_call(PROMPT.len() as u32 + 3);
    let mut heard = stage.answer(&mut backend, 3);
    for host in &stage.hosts {
        assert_eq!(host.state().asked, [1, 11]);
    }
    // The model's context is 4096, but no host is asked for that.
    stage.call(&mut backend, &PROMPT, 3, &mut heard).unwrap();
    for host in &stage.hosts {
        assert!(matches!(host.state().asked[..], [1, 11, more] if (22..2048).contains(&more)));
    }
    assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, 3), (&PROMPT, 3)]));
}

#[test]
fn a_sequence_reports_itself_idle_after_a_call() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    stage.answer(&mut backend, 3);
    stage.until("both hosts have heard it", || {
        stage.hosts.iter().all(|host| host.state().rests == [11])
    });
}
