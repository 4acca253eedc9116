//! Hosts that a verdict convicts while they compute for an answer.

use super::*;

impl Stage {
    /// Convicts a host, so that the sessions with it are closed.
    fn convict(&self, host: &Puppet) {
        self.convicted.lock().insert(host.addr.node);
        let links = self.links.iter();
        for link in links.filter(|link| link.addr.node == host.addr.node) {
            link.closer().close(CloseCode::Unauthorized);
        }
    }
}

/// Tokens before the verdict.
const BEFORE: usize = 5;

#[test]
fn after_a_verdict_a_running_answer_goes_on_as_if_all_hosts_had_been_honest() {
    for lie in [Lie::SkipsLayer, Lie::Yesterday] {
        for span in [0, 1] {
            let stage = Stage::new(&HALVES);
            let mut backend = stage.open();
            let liar = stage.runs(&backend, span);
            liar.state().lies = Some(lie);
            let (mut degraded, mut moves) = (Vec::new(), Vec::new());
            let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
            let mut next = PROMPT.to_vec();
            backend.begin_call(0);
            while outputs.len() < 2 * BEFORE {
                if outputs.len() == BEFORE {
                    stage.convict(liar);
                }
                let mut run = Run {
                    cancel: &stage.cancel,
                    notify: &mut |frame| match frame {
                        Frame::ShardStatus { code, .. } => degraded.extend(code),
                        Frame::ShardFailover { code, .. } => moves.push(code),
                        _ => {}
                    },
                };
                let position = inputs.len() as u32;
                let out = run_rows(&mut backend, position, &rows(&next), &mut run).unwrap();
                inputs.append(&mut next);
                outputs.push(out[0] as u32);
                next.push(out[0] as u32);
            }
            backend.end_call();
            assert_eq!(
                (degraded, moves),
                (vec![Code::CONVICTED], vec![Code::CONVICTED])
            );
            let honest: Vec<u32> = inputs.into_iter().map(honest(0..LAYERS)).collect();
            let honest = &honest[PROMPT.len() - 1..];
            assert_ne!(
                outputs[..BEFORE],
                honest[..BEFORE],
                "{lie:?} of host {span}"
            );
            assert_eq!(
                outputs[BEFORE..],
                honest[BEFORE..],
                "{lie:?} of host {span}"
            );
            assert_ne!(stage.runs(&backend, span).node(), liar.node());
            // The verdict alone excludes it.
            stage.all_are_good();
            drop(backend);
            stage.until_empty();
        }
    }
}

#[test]
fn without_another_host_a_verdict_ends_the_answer() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    stage.answer(&mut backend, 3);
    stage.convict(&stage.hosts[0]);
    let ended = stage.call(&mut backend, &[5], 1, &mut Heard::default());
    let why = ended.unwrap_err();
    assert_eq!(why.code().as_str(), "shard_unavailable");
    assert!(why.to_string().contains("signed wrong rows"), "{why}");
}
