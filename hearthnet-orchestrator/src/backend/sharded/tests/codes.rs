//! Codes of hosts, and what the caller does (`specs/error-codes.md`).

use super::*;

/// Runs a call on two hosts of the first layers, of which the first one acts. Returns the codes of which
/// the caller was told, and the failures that it counts. Its answer must be as without failures.
fn replaced(act: impl Fn(&Puppet)) -> (Vec<Code>, Vec<FailureKind>) {
    let stage = Stage::new(&HALVES);
    let mut backend = stage.open();
    let node = stage.runs(&backend, 0).node();
    act(stage.host(&node));
    let heard = stage.answer(&mut backend, 12);
    assert_ne!(stage.runs(&backend, 0).node(), node);
    let counted = stage.health.all().into_iter();
    let failures =
        counted.flat_map(|one| one.failures.into_keys().map(move |kind| (one.host, kind)));
    let failures: Vec<_> = failures.collect();
    assert!(failures.iter().all(|(host, _)| host.to_string() == node));
    let kinds = failures.into_iter().map(|(_, kind)| kind).collect();
    (heard.degraded, kinds)
}

#[test]
fn a_host_that_ends_its_session_is_replaced_whatever_its_code() {
    for code in [
        CloseCode::Shutdown,
        CloseCode::SessionExpired,
        CloseCode::KeepAlive,
        CloseCode::Internal,
        CloseCode::WebSocket,
        CloseCode::FrameLength,
        CloseCode::FrameTooBig,
        CloseCode::FrameUnknown,
        CloseCode::FrameSequence,
        CloseCode::FrameRate,
        CloseCode::ProtocolState,
        CloseCode::BodyMalformed,
        CloseCode::CreditOverrun,
        CloseCode::CreditOverflow,
        CloseCode::CreditAck,
        CloseCode::CreditStall,
        CloseCode::BufferOverrun,
        CloseCode::ChunkTooSmall,
        CloseCode::TensorId,
        CloseCode::TensorShape,
        CloseCode::Decompression,
        CloseCode::PipelineStalled,
    ] {
        let (told, failures) = replaced(|host| host.at(9, Deed::End(code)));
        assert_eq!(told, ["connection_lost"], "{code:?}");
        assert_eq!(failures, [FailureKind::Lost], "{code:?}");
    }
    // The log decides about authorisation.
    for code in [CloseCode::Unauthorized, CloseCode::Revoked] {
        let (told, failures) = replaced(|host| host.at(9, Deed::End(code)));
        assert_eq!(told, [code.as_str()]);
        assert_eq!(failures, []);
    }
}

#[test]
fn a_host_that_ends_a_stream_is_replaced_and_blamed_by_its_code() {
    const REFUSED: &[FailureKind] = &[FailureKind::Refused];
    for (code, is_told, failures) in [
        ("tensor_nonfinite", true, REFUSED),
        ("tensor_shape", true, REFUSED),
        ("weights_unavailable", true, REFUSED),
        ("internal", true, REFUSED),
        ("unknown_stream", true, REFUSED),
        ("queue_full", true, &[]),
        ("idle_timeout", true, &[]),
        ("kv_full", true, &[]),
        ("preempted", false, &[]),
        ("step_quota", false, &[]),
        ("position_gap", false, &[]),
        ("shutting_down", false, &[]),
    ] {
        let (told, counted) = replaced(|host| host.at(9, Deed::Refuse(code)));
        assert_eq!(told, [code][..usize::from(is_told)], "{code}");
        assert_eq!(counted, failures, "{code}");
    }
}

#[test]
fn a_host_that_refuses_a_stream_is_passed_over_and_blamed_by_its_code() {
    const REFUSED: &[FailureKind] = &[FailureKind::Refused];
    for (code, failures) in [
        ("bad_descriptor", REFUSED),
        ("layer_range", REFUSED),
        ("weights_mismatch", REFUSED),
        ("weights_unavailable", REFUSED),
        ("kv_too_small", &[]),
        ("stream_limit", &[]),
        ("stream_quota", &[]),
        ("stream_churn", &[]),
        ("kv_full", &[]),
        ("kv_quota", &[]),
        ("shutting_down", &[]),
    ] {
        let stage = Stage::new(&HALVES);
        let first = stage.runs(&stage.open(), 0).node();
        stage.host(&first).state().refusals = vec![code];
        let mut backend = stage.open();
        stage.answer(&mut backend, 5);
        assert!(
            stage.host(&first).state().refusals.is_empty(),
            "it is asked"
        );
        assert_ne!(stage.runs(&backend, 0).node(), first, "{code}");
        let counted = stage.health_of(&first).failures.into_keys();
        assert_eq!(counted.collect::<Vec<_>>(), failures, "{code}");
    }
}

#[test]
fn a_text_that_is_too_long_for_a_host_ends_the_call_and_blames_no_host() {
    let stage = Stage::new(&HALVES);
    let mut backend = stage.open();
    stage.runs(&backend, 0).at(9, Deed::Refuse("context_full"));
    let ended = stage.call(&mut backend, &PROMPT, 5, &mut Heard::default());
    assert!(matches!(ended, Err(ChatError::BadRequest(_))), "{ended:?}");
    stage.all_are_good();
}

/// Refuses every HELLO with a code.
struct Refuses(CloseCode);

impl Admission for Refuses {
    fn admit_peer(&self, _: &NodeId) -> bool {
        true
    }
    fn admit_hello(&self, _: &NodeId, _: &Hello, _: u64) -> Result<(), CloseCode> {
        Err(self.0)
    }
}

#[test]
fn a_caller_whose_session_is_refused_names_the_code() {
    let runtime = Runtime::new().unwrap();
    let key = NodeKey::from_secret(&[1; 32]);
    let identity = Identity::from_secret(&key.secret()).unwrap();
    for code in [
        CloseCode::TokenAudience,
        CloseCode::TokenExpired,
        CloseCode::TokenInvalid,
        CloseCode::TokenReplayed,
        CloseCode::TokenScope,
        CloseCode::TokenSubject,
        CloseCode::PurposeUnknown,
        CloseCode::VersionUnsupported,
        CloseCode::SessionLimit,
        CloseCode::Unauthorized,
        CloseCode::Revoked,
    ] {
        let refused = runtime.block_on(async {
            let (admission, config) = (Arc::new(Refuses(code)), Config::default());
            let listener = Listener::bind("127.0.0.1:0", &identity, admission, config, &[]);
            let mut listener = listener.await.unwrap();
            let addr = HostAddr {
                endpoint: listener.local_addr().to_string(),
                node: key.id(),
            };
            let caller = caller_key();
            tokio::select! {
                link = HostLink::connect(&addr, &caller, Config::default()) => link.err(),
                _ = listener.session() => None,
            }
        });
        let Some(ChatError::ShardUnavailable(why)) = refused else {
            panic!("{code:?}: {refused:?}")
        };
        assert!(why.contains(code.as_str()), "{why}");
        // Each session has a token of its own, so only a clock makes one expire.
        assert_eq!(
            why.contains("timedatectl"),
            code == CloseCode::TokenExpired,
            "{why}"
        );
    }
}
