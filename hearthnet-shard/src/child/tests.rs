//! An engine behind a connection behaves like the engine itself, and a peer that breaks the protocol
//! loses the engine and nothing else.

use std::io::Write as _;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearthnet_engine::{Engine, EngineOptions};
use hearthnet_files::spec::RowShape;
use hearthnet_platform::pipe::Pipe;
use hearthnet_testkit::{TinyLlama, one_thread};
use proptest::prelude::*;

use super::message::*;
use super::remote::RemoteEngine;
use super::serve::{Served, serve};
use super::*;
use crate::device::Device;
use crate::engine::{EngineSource as _, LayerEngine, LoadFault, Span};
use crate::fault::{Resource, StreamFault};
use crate::tests::fake::{FakeSource, KV_BYTES, OVERFLOWS, PAGE, Probe, WEIGHT_BYTES, WIDTH};

/// Passes bytes as a message through a connection.
fn sent(write: impl FnOnce(&mut Message)) -> (u8, Vec<u8>) {
    let (one, other) = Pipe::pair().unwrap();
    let mut message = Message::default();
    write(&mut message);
    message.send(&one).unwrap();
    let (kind, fields) = message.receive(&other, REPLY_LIMIT).unwrap();
    (kind, fields.rest().to_vec())
}

fn load() -> Load {
    Load {
        range: 2..6,
        niceness: 5,
        options: EngineOptions {
            threads: 3,
            max_context: Some(77),
            ..one_thread()
        },
        device: Device::Card(Some(3)),
        manifest: b"a manifest".to_vec(),
    }
}

#[test]
fn loads_and_faults_arrive_as_they_were_sent() {
    let (kind, fields) = sent(|to| load().write(3, to));
    let (files, read) = Load::read(Fields::new(&fields)).unwrap();
    assert_eq!(files, 3);
    assert_eq!((kind, format!("{read:?}")), (LOAD, format!("{:?}", load())));

    for too_little in [None, Some(Resource::Memory), Some(Resource::Threads)] {
        let reason = "tensor x is damaged".to_owned();
        let fault = LoadFault { reason, too_little };
        let (_, fields) = sent(|to| write_load_fault(&fault, to));
        assert_eq!(read_load_fault(Fields::new(&fields)).unwrap(), fault);
    }
    let (position, length, max, layer) = (9, 7, 100, 3);
    let reason = "a thread failed".to_owned();
    for fault in [
        StreamFault::PositionGap { position, length },
        StreamFault::ContextFull { max },
        StreamFault::KvFull,
        StreamFault::TensorNonFinite,
        StreamFault::BoundaryOverflow { layer },
        StreamFault::Internal { reason },
    ] {
        let (_, fields) = sent(|to| write_fault(&fault, to.start(FAULT)));
        assert_eq!(read_fault(Fields::new(&fields)).unwrap(), fault);
    }
}

#[test]
fn no_message_makes_either_side_panic() {
    let file = TinyLlama::default().file();
    let mut engine = Engine::load(&file, 0..2, &one_thread(), &mut |_, _| {}).unwrap();
    LayerEngine::open(&mut engine).unwrap();
    let served = Served::new(engine, file.spec().row_shape());
    let served = std::cell::RefCell::new(served);
    let kinds = prop_oneof![
        Just(OPEN),
        Just(CLOSE),
        Just(TRUNCATE),
        Just(FORWARD),
        Just(FORK),
        any::<u8>()
    ];
    let bytes = proptest::collection::vec(prop_oneof![0_u8..3, any::<u8>()], 0..200);
    proptest!(|(kind in kinds, bytes in bytes)| {
        let fields = || Fields::new(&bytes);
        let _ = served.borrow_mut().act(kind, fields());
        let _ = Load::read(fields());
        let _ = read_progress(fields());
        let _ = read_loaded(fields());
        let _ = read_load_fault(fields());
        let _ = read_fault(fields());
    });
}

/// Source whose engine the closure serves in a thread.
fn source(child: impl Fn(Pipe) + Send + Sync + 'static) -> RemoteSource {
    let child = Arc::new(child);
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_owned();
    let connect = Box::new(move || {
        let (near, far) = Pipe::pair()?;
        let (child, _file) = (Arc::clone(&child), &file);
        std::thread::spawn(move || child(far));
        Ok(near)
    });
    RemoteSource::new(path, load(), connect)
}

/// Reads the request to load.
fn read_load(pipe: &Pipe) {
    let mut message = Message::default();
    let (kind, fields) = message.receive(pipe, REPLY_LIMIT).unwrap();
    assert_eq!(kind, LOAD);
    for _ in 0..Load::read(fields).unwrap().0 {
        pipe.receive_file().unwrap().unwrap();
    }
}

fn remote(child: impl Fn(Pipe) + Send + Sync + 'static) -> RemoteEngine {
    source(child).load(&mut |_| {}).unwrap()
}

fn fake(probe: &Arc<Probe>) -> RemoteEngine {
    let probe = Arc::clone(probe);
    remote(move |pipe| {
        read_load(&pipe);
        let engine = FakeSource(Arc::clone(&probe)).load(&mut |_| {}).unwrap();
        serve(&pipe, engine, RowShape::plain(WIDTH)).unwrap();
    })
}

#[test]
fn an_engine_behind_a_connection_gives_the_same_results() {
    let mut own = FakeSource(Arc::default()).load(&mut |_| {}).unwrap();
    let probe = Arc::new(Probe::default());
    let mut far = fake(&probe);
    assert_eq!(far.weight_bytes(), WEIGHT_BYTES);
    assert_eq!(far.footprint(), own.footprint());
    let (a, b) = (own.open().unwrap(), own.open().unwrap());
    let (c, d) = (far.open().unwrap(), far.open().unwrap());
    let rows: Vec<f32> = (0..12).map(|n| n as f32).collect();
    let (mut x, mut y) = (rows.clone(), rows.clone());
    let (one, two) = (Span::new(a, 0, 2), Span::new(b, 0, 1));
    own.forward((2, 5), &[one, two], &mut x).unwrap();
    let (one, two) = (Span::new(c, 0, 2), Span::new(d, 0, 1));
    far.forward((2, 5), &[one, two], &mut y).unwrap();
    assert_eq!(x, y);
    assert_eq!((far.len(c), far.len(d)), (2, 1));
    assert_eq!(far.kv_bytes_in_use(), 2 * u64::from(PAGE) * KV_BYTES);

    // A batch that fails in its second row has changed the first sequence.
    let mut rows = [1.0; 8];
    rows[4] = OVERFLOWS;
    let spans = [Span::new(d, 1, 1), Span::new(c, 2, 1)];
    let fault = far.forward((2, 5), &spans, &mut rows).unwrap_err();
    assert_eq!(fault, StreamFault::BoundaryOverflow { layer: 3 });
    assert_eq!((far.len(c), far.len(d)), (2, 2));
    assert_eq!(far.truncate(d, 1), Ok(1));
    assert_eq!(far.len(d), 1);
    let (position, length) = (5, 1);
    let gap = StreamFault::PositionGap { position, length };
    assert_eq!(far.truncate(d, 5), Err(gap));
    assert_eq!(far.len(d), 1);
    far.close(c);
    assert_eq!(
        (far.len(c), far.kv_bytes_in_use()),
        (0, u64::from(PAGE) * KV_BYTES)
    );
    assert!(!far.is_lost());
}

#[test]
fn an_engine_that_is_dropped_ends_its_process() {
    let probe = Arc::new(Probe::default());
    let far = fake(&probe);
    assert_eq!(probe.loaded.load(std::sync::atomic::Ordering::SeqCst), 1);
    drop(far);
    while probe.loaded.load(std::sync::atomic::Ordering::SeqCst) > 0 {
        std::thread::yield_now();
    }
}

/// Loads, and answers the next request with these bytes; without bytes, it ends.
fn answering(bytes: &'static [u8]) -> RemoteEngine {
    remote(move |pipe| {
        read_load(&pipe);
        let mut message = Message::default();
        message.start(LOADED).u64(1).u64(0).u64(1);
        message.u32(1).send(&pipe).unwrap();
        message.receive(&pipe, REPLY_LIMIT).unwrap();
        (&pipe).write_all(bytes).unwrap();
        if !bytes.is_empty() {
            // Stays there until the host gives up.
            let _ = message.receive(&pipe, REPLY_LIMIT);
        }
    })
}

#[test]
fn a_process_that_breaks_the_protocol_is_a_lost_engine() {
    for bytes in [
        // No reply, no kind, an unknown kind, too short, too long, a length beyond the limit.
        &[][..],
        &[0, 0, 0, 0],
        &[1, 0, 0, 0, 99],
        &[2, 0, 0, 0, DONE, 0],
        &[
            18, 0, 0, 0, DONE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7,
        ],
        &[255, 255, 255, 255, DONE],
    ] {
        let mut far = answering(bytes);
        assert!(!far.is_lost());
        let fault = far.open().unwrap_err();
        assert_eq!(fault.code().as_str(), "internal", "{bytes:?}");
        assert!(far.is_lost(), "{bytes:?}");
        assert!(far.forward((2, 5), &[], &mut []).is_err());
        far.close(1);
        assert_eq!((far.len(1), far.kv_bytes_in_use()), (0, 0));
    }
}

#[test]
fn a_process_that_ends_while_it_loads_is_an_error_of_the_load() {
    let mut source = source(|pipe| read_load(&pipe));
    let Err(fault) = source.load(&mut |_| {}) else {
        panic!("it loaded");
    };
    assert!(fault.reason.contains("ended while it loaded"), "{fault}");
}

#[test]
fn lost_processes_are_replaced_three_times_in_ten_minutes() {
    let mut source = source(drop);
    let replaced: Vec<bool> = (0..5).map(|_| source.may_reload()).collect();
    assert_eq!(replaced, [true, true, true, false, false]);
}

/// The exact engine behind a connection, and the thread that computes.
fn exact(model: &TinyLlama, layers: std::ops::Range<u32>) -> (RemoteSource, JoinHandle<()>) {
    let directory = tempfile::tempdir().unwrap();
    let path = model.write(directory.path());
    exact_at(model, &path, directory, layers)
}

/// As [`exact`], over the files at `path`.
fn exact_at(
    model: &TinyLlama,
    path: &std::path::Path,
    directory: tempfile::TempDir,
    layers: std::ops::Range<u32>,
) -> (RemoteSource, JoinHandle<()>) {
    let manifest = model.file().manifest(&mut |_, _| {}).encode();
    let (near, far) = Pipe::pair().unwrap();
    let mut near = Some(near);
    let connect = Box::new(move || {
        let _keep = &directory;
        Ok(near.take().expect("one process"))
    });
    let load = Load {
        range: layers,
        manifest,
        ..load()
    };
    let child = std::thread::spawn(move || serve_engine(&far, |_| load_on_processor).unwrap());
    (RemoteSource::new(path.to_owned(), load, connect), child)
}

#[test]
fn the_files_of_a_split_model_are_loaded_behind_a_connection() {
    let model = TinyLlama::default();
    let directory = tempfile::tempdir().unwrap();
    let files = hearthnet_testkit::split(&model.bytes(), 3);
    let path = hearthnet_testkit::write_split(directory.path(), &files);
    let (mut source, child) = exact_at(&model, &path, directory, 0..2);
    let engine = source.load(&mut |_| {}).unwrap();
    assert!(engine.weight_bytes() > 0);
    drop(engine);
    child.join().unwrap();
}

#[test]
fn layer_inputs_pass_through_a_connection() {
    let folder = "../crates/hearthnet-files/tests/data/families/gemma4ple.gguf";
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let file = hearthnet_files::ModelFile::open(&path).unwrap();
    let mut own = Engine::load(&file, 0..2, &one_thread(), &mut |_, _| {}).unwrap();
    let seq = LayerEngine::open(&mut own).unwrap();
    let behind = Engine::load(&file, 0..2, &one_thread(), &mut |_, _| {}).unwrap();
    let mut served = Served::new(behind, file.spec().row_shape());
    let far = served.act(OPEN, Fields::new(&[])).unwrap().unwrap();
    // Both layers, and one of them.
    for (at, hi) in [(0, 1), (0, 0)] {
        let values = file.spec().row_values(&(0..hi + 1));
        let rows = (0..2 * values).map(|n| (n % 5) as f32 - 2.0);
        let mut rows: Vec<f32> = rows.collect();
        LayerEngine::truncate(&mut own, seq, 0).unwrap();
        let (_, fields) = sent(|to| {
            to.start(FORWARD)
                .u32(0)
                .u32(hi)
                .u32(1)
                .u64(far)
                .u32(at)
                .u32(2)
                .rows(&rows);
        });
        let seqs = served.act(
            TRUNCATE,
            Fields::new(&[&far.to_le_bytes()[..], &[0; 4]].concat()),
        );
        assert_eq!(seqs.unwrap(), Ok(0));
        assert_eq!(served.act(FORWARD, Fields::new(&fields)).unwrap(), Ok(0));
        LayerEngine::forward(&mut own, (0, hi), &[Span::new(seq, at, 2)], &mut rows).unwrap();
        assert_eq!(served.x, rows);
        // Rows without the inputs are not what a host sends.
        let cut = &fields[..fields.len() - 4];
        assert!(served.act(FORWARD, Fields::new(cut)).is_err());
    }
}

#[test]
fn the_exact_engine_behind_a_connection_gives_the_same_bits() {
    let model = TinyLlama::default();
    let file = model.file();
    let (layers, width) = (0..file.spec().layers, file.spec().width as usize);
    let mut own = Engine::load(&file, layers.clone(), &one_thread(), &mut |_, _| {}).unwrap();
    let (mut source, child) = exact(&model, layers.clone());
    let mut phases = Vec::new();
    let mut far = source.load(&mut |step| phases.push(step.phase)).unwrap();
    phases.dedup();
    use crate::LoadPhase::{Loading, Verifying};
    assert_eq!(phases, [Verifying, Loading]);
    assert_eq!(far.footprint(), LayerEngine::footprint(&own));
    let hi = layers.end - 1;
    let (a, b) = (LayerEngine::open(&mut own).unwrap(), far.open().unwrap());
    let mut at = 0;
    for rows in [3, 1, 1] {
        let start = (0..rows as usize * width).map(|n| (n % 7) as f32 - 3.0);
        let (mut x, mut y): (Vec<f32>, Vec<f32>) = start.map(|v| (v, v)).unzip();
        LayerEngine::forward(&mut own, (0, hi), &[Span::new(a, at, rows)], &mut x).unwrap();
        far.forward((0, hi), &[Span::new(b, at, rows)], &mut y)
            .unwrap();
        let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&x), bits(&y));
        at += rows;
    }
    // A fork at an earlier position continues like a sequence that has only those rows.
    let short = LayerEngine::fork(&mut own, a, 4).unwrap();
    let fork = far.fork(b, 4).unwrap();
    assert_eq!((far.len(fork), far.len(b)), (4, at));
    let start = (0..width).map(|n| (n % 5) as f32 - 2.0);
    let (mut x, mut y): (Vec<f32>, Vec<f32>) = start.map(|v| (v, v)).unzip();
    LayerEngine::forward(&mut own, (0, hi), &[Span::new(short, 4, 1)], &mut x).unwrap();
    far.forward((0, hi), &[Span::new(fork, 4, 1)], &mut y)
        .unwrap();
    assert_eq!(x, y);
    assert!(matches!(
        far.fork(b, at + 1),
        Err(StreamFault::PositionGap { .. })
    ));
    drop(far);
    child.join().unwrap();
}

#[test]
fn a_file_that_does_not_match_its_manifest_is_refused_by_the_process() {
    let model = TinyLlama::default();
    let (mut source, child) = exact(&model, 0..99);
    let Err(fault) = source.load(&mut |_| {}) else {
        panic!("it loaded");
    };
    assert!(!fault.reason.contains("ended while"), "{fault}");
    child.join().unwrap();
}

/// Environment variable of the process that computes for [`the_cost_of_the_boundary`].
const CHILD: &str = "HEARTHNET_TEST_ENGINE_CHILD";

/// Exact engine that tells the nanoseconds of its last batch as its bytes of KV.
struct Timed(Engine, u64);

impl LayerEngine for Timed {
    type Seq = hearthnet_engine::SeqId;

    fn open(&mut self) -> Result<Self::Seq, StreamFault> {
        LayerEngine::open(&mut self.0)
    }

    fn fork(&mut self, seq: Self::Seq, length: u32) -> Result<Self::Seq, StreamFault> {
        LayerEngine::fork(&mut self.0, seq, length)
    }

    fn close(&mut self, seq: Self::Seq) {
        LayerEngine::close(&mut self.0, seq);
    }

    fn len(&self, seq: Self::Seq) -> u32 {
        LayerEngine::len(&self.0, seq)
    }

    fn truncate(&mut self, seq: Self::Seq, length: u32) -> Result<u32, StreamFault> {
        LayerEngine::truncate(&mut self.0, seq, length)
    }

    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<Self::Seq>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        let since = Instant::now();
        let done = LayerEngine::forward(&mut self.0, layers, spans, x);
        self.1 = since.elapsed().as_nanos() as u64;
        done
    }

    fn weight_bytes(&self) -> u64 {
        LayerEngine::weight_bytes(&self.0)
    }

    fn footprint(&self) -> crate::Footprint {
        LayerEngine::footprint(&self.0)
    }

    fn kv_bytes_in_use(&self) -> u64 {
        self.1
    }
}

#[test]
#[ignore = "the process that another test starts"]
fn engine_child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let pipe = Pipe::from_stdin().unwrap();
    read_load(&pipe);
    let file = hearthnet_files::ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    let engine = Engine::load(&file, LAYERS, &one_thread(), &mut |_, _| {}).unwrap();
    serve(&pipe, Timed(engine, 0), file.spec().row_shape()).unwrap();
}

/// Layers of the measurement.
const LAYERS: std::ops::Range<u32> = 2..16;

/// Time of a step less the time that the engine computes in its process.
#[test]
#[ignore = "a measurement"]
fn the_cost_of_the_boundary() {
    let path = hearthnet_testkit::smollm2();
    let file = hearthnet_files::ModelFile::open(&path).unwrap();
    let width = file.spec().width as usize;
    let connect = Box::new(|| {
        let (near, far) = Pipe::pair()?;
        let mut command = hearthnet_platform::process::this_program();
        command.args(["--exact", "--ignored", "child::tests::engine_child"]);
        command.env(CHILD, "1").stdin(far);
        command.stdout(std::process::Stdio::null());
        command.spawn().map(|_| near)
    });
    let mut source = RemoteSource::new(path, load(), connect);
    let mut far = source.load(&mut |_| {}).unwrap();
    let seqs: Vec<u64> = (0..8).map(|_| far.open().unwrap()).collect();
    let head = hearthnet_engine::Head::load(&file, &one_thread()).unwrap();
    let mut rows = Vec::new();
    let ids = [17, 99, 1, 5, 1000, 77, 300, 42];
    head.embed(&ids, &mut rows).unwrap();
    println!("rows   pause   step p50, p90        boundary p10, p50, p90 (us)");
    for pause in [0, 1, 4] {
        for count in [1, 8] {
            let (mut steps, mut costs) = (Vec::new(), Vec::new());
            for round in 0..300 {
                let at = round % 60;
                if at == 0 {
                    for &seq in &seqs {
                        far.truncate(seq, 0).unwrap();
                    }
                }
                let mut x = rows[..count * width].to_vec();
                let spans = seqs[..count].iter().map(|seq| Span::new(*seq, at, 1));
                let spans: Vec<_> = spans.collect();
                std::thread::sleep(Duration::from_millis(pause));
                let since = Instant::now();
                far.forward((LAYERS.start, LAYERS.end - 1), &spans, &mut x)
                    .unwrap();
                let step = since.elapsed();
                steps.push(step);
                costs.push(step - Duration::from_nanos(far.kv_bytes_in_use()));
            }
            steps.sort();
            costs.sort();
            let us = |times: &[Duration], percent: usize| -> f64 {
                times[times.len() * percent / 100].as_secs_f64() * 1e6
            };
            println!(
                "{count:4} {pause:4} ms {:10.1} {:9.1} {:14.1} {:9.1} {:9.1}",
                us(&steps, 50),
                us(&steps, 90),
                us(&costs, 10),
                us(&costs, 50),
                us(&costs, 90),
            );
        }
    }
}
