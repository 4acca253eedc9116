//! Weights of an adopted model from neighbours that end, return, damage their disks, or lie.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use hearthnet_bus::NodeKey;
use hearthnet_bus::calls::Registry;
use hearthnet_bus::log::EventLog;
use hearthnet_bus::node::weights::{Held, Object, WeightsStore};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_files::part::Part;
use hearthnet_testkit::{TinyDirectory, TinyLlama};
use tokio::runtime::Runtime;

use crate::support::gauges::Gauges;
use crate::support::up::{Household, Up, medium};
use crate::support::*;

/// Memory for all layers of the models here, in MiB.
pub(crate) const ALL: u32 = 4096;

/// Random model with 43 MiB per layer.
fn large(layers: u32) -> TinyLlama {
    TinyLlama {
        width: 1024,
        heads: 16,
        ffn: 2816,
        ..medium(layers)
    }
}

/// Founder that runs with all layers of a model.
pub(crate) fn founded(model: &TinyLlama) -> (Household, Up) {
    let founder = Household::new(ALL, &[]);
    let file = model.write(founder.home.path());
    let file = file.to_str().expect("UTF-8");
    let up = founder.up(&["--found", "Elm", "--model", file]);
    founder.until_serving(&up);
    (founder, up)
}

/// Lets a home join, without a daemon.
fn join(home: &Household, founder: &Up) {
    let join = ["community", "join", "--research", "on", founder.code()];
    succeeded(&home.run(&join));
}

/// Weights id of the model of which a home has a part.
fn weights_id(home: &Household) -> String {
    let part = home.part().expect("a part");
    part.identity().weights.to_string()
}

/// Asserts that a part holds only genuine pieces, and returns their bytes.
pub(crate) fn genuine(home: &Household) -> u64 {
    let Some(part) = home.part() else {
        return 0;
    };
    let held = part.held();
    for index in held.iter().cloned().flatten() {
        let read = part.read(index).expect("a readable disk");
        assert!(read.is_some(), "piece {index} is damaged");
    }
    part.table().bytes(&held)
}

/// Bytes that a home had to fetch for what it holds, of these layers at least.
pub(crate) fn needed(home: &Household, layers: u32) -> u64 {
    let part = home.part().expect("a part");
    let table = part.table();
    let wanted = [table.of_head(), table.of_layers(0, layers - 1)].concat();
    assert!(part.missing(&wanted).is_empty());
    let identity = part.identity();
    let objects = identity.head_bytes + identity.manifest_bytes + table.list().len() as u64;
    table.bytes(&part.held()) + objects
}

#[test]
fn a_home_that_was_killed_during_a_fetch_resumes_it() {
    let (_attic, first) = founded(&large(8));
    let cellar = Household::new(ALL, &[&first.address]).holding(7);
    let mut second = cellar.up(&["--join", first.code()]);
    // Only synced pieces count after a restart.
    let begun = || {
        cellar
            .part()
            .map_or(0, |part| part.table().bytes(&part.held()))
    };
    let least = 64 << 20;
    until("a fetch has begun", || begun() >= least);
    second.kill();
    let kept = genuine(&cellar);
    let sent = first.sent();
    assert!(kept >= least, "{kept}");

    second = cellar.up(&[]);
    cellar.until_serving(&second);
    let needed = needed(&cellar, 7);
    assert!(kept < needed, "the fetch was over before the kill");
    eprintln!(
        "needed {needed}, kept {kept} of {sent} sent, {} in all",
        first.sent()
    );
    assert!(first.sent() * 10 <= needed * 11);
    genuine(&cellar);
}

/// Flips a byte of a part's file at the beginning of a layer's first piece.
fn damage(home: &Household, layer: u32) -> u32 {
    let part = home.part().expect("a part");
    let runs = part.table().of_layers(layer, layer);
    // Vectors of a layer are short: take its longest piece.
    let pieces = runs.into_iter().flatten();
    let pieces = pieces.filter_map(|index| part.table().piece(index));
    let piece = pieces.max_by_key(|piece| piece.len).expect("a piece");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(part.path());
    let file = file.expect("the part's file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, piece.offset).expect("a byte");
    file.write_all_at(&[!byte[0]], piece.offset)
        .expect("a disk");
    piece.index
}

#[test]
fn damaged_pieces_are_fetched_again_before_they_are_used() {
    let (_attic, first) = founded(&medium(4));
    let cellar = Household::new(ALL, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    let range = cellar.until_serving(&second);
    assert_eq!(range, (2, 3));
    second.stop();
    // A private layer of chats, and a layer for others.
    for layer in [0, 3] {
        let sent = first.sent();
        let piece = damage(&cellar, layer);
        let second = cellar.up(&[]);
        assert_eq!(cellar.until_serving(&second), range);
        let part = cellar.part().expect("a part");
        assert!(part.read(piece).expect("a disk").is_some(), "layer {layer}");
        let again = first.sent() - sent;
        assert!(again > 0 && again <= 2 * 262_144, "layer {layer}: {again}");
        second.stop();
    }
}

const QUESTION: [&str; 4] = [
    "chat",
    "Name three colours.",
    "--temperature=0",
    "--max-tokens=8",
];
/// A host without streams unloads its weights after a second.
const UNLOADS: &str = "research.distributed_inference.host.shard_eviction_idle_seconds=1";

fn until_unloaded(up: &Up) {
    let loaded = || Gauges::at(&up.http).value("hearthnet_shard_weight_bytes");
    until("the weights are unloaded", || loaded() == Some(0.0));
}

/// Number of times that a host withdrew, because it could not load its weights again.
fn withdrawals(up: &Up) -> usize {
    let why = "are withdrawn, because their weights cannot be loaded again";
    up.said().matches(why).count()
}

/// Lets a home ask until a host that cannot load its weights again has withdrawn so many times.
fn until_withdrawn(host: &Up, caller: &Household, times: usize) {
    host.until("it withdraws", TIMEOUT, || {
        if withdrawals(host) < times {
            caller.run(&QUESTION);
        }
        withdrawals(host) == times
    });
}

#[test]
fn a_host_whose_unloaded_weights_are_gone_withdraws_until_a_neighbour_has_sent_them() {
    let (attic, first) = founded(&medium(4));
    let file = attic.home.path().join("tiny-f32-1.gguf");
    let alone = attic.alone(&QUESTION, &file);
    // It has memory for these layers only, so that it does not move.
    let cellar = Household::new(30, &[&first.address]).with(UNLOADS);
    let second = cellar.up(&["--join", first.code()]);
    let range = cellar.until_serving(&second);
    assert_eq!(range, (2, 3));
    until_unloaded(&second);
    damage(&cellar, 3);
    // The caller goes on alone, or waits for the host.
    let answer = until_answered(|| attic.run(&QUESTION));
    assert_eq!(succeeded(&answer), alone);
    until_withdrawn(&second, &attic, 1);
    assert_eq!(cellar.until_serving(&second), range);
    genuine(&cellar);

    // Streams of its chats end with it.
    let address = first.address.clone();
    first.kill();
    until_unloaded(&second);
    std::fs::remove_file(cellar.part().expect("a part").path()).expect("a file");
    let _first = attic.up_at(&address, &[]);
    until_withdrawn(&second, &attic, 2);
    assert_eq!(cellar.until_serving(&second), range);
    genuine(&cellar);
}

#[test]
fn a_host_of_a_users_file_that_is_gone_withdraws_and_names_it() {
    let (attic, first) = founded(&medium(4));
    let cellar = Household::new(ALL, &[&first.address]).with(UNLOADS);
    join(&cellar, &first);
    let file = medium(4).write(cellar.home.path());
    let path = file.to_str().expect("UTF-8");
    let second = cellar.serve(&["--model", path, "--layers", "2-3"]);
    assert_eq!(cellar.until_serving(&second), (2, 3));
    until_unloaded(&second);
    std::fs::remove_file(&file).expect("a file");
    until_withdrawn(&second, &attic, 1);
    second.until("it serves nothing", TIMEOUT, || cellar.serving().is_none());
    let why = format!("no layers are served for now: cannot read {path}");
    second.until("it names the file", TIMEOUT, || {
        second.said().contains(&why)
    });
}

/// Store of a part that claims every piece and sends wrong bytes.
struct Liar(Part);

impl WeightsStore for Liar {
    fn held(&self, weights: &[u8; 32]) -> Option<Held> {
        (*weights == self.0.identity().weights.0).then(|| Held {
            pieces: std::iter::once(self.0.table().all()).collect(),
            ..Held::default()
        })
    }

    fn piece(&self, _: &[u8; 32], index: u32) -> Option<Vec<u8>> {
        let piece = self.0.table().piece(index)?;
        Some(vec![7; piece.len as usize])
    }

    fn read(&self, _: &[u8; 32], _: Object, _: u64, _: u32) -> Option<Vec<u8>> {
        None
    }
}

/// Node of a member that lies, until it is dropped.
struct Lies {
    _runtime: Runtime,
    _node: Node,
    address: String,
}

impl Lies {
    fn start(home: &Home, founder: &Up, part: Part) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let data = home.path().join("data");
        let key = NodeKey::load(&data.join("node.key")).expect("its key");
        let log = EventLog::open(&data).expect("its log");
        let mut settings = NodeSettings::new("liar");
        settings.listen = Some("127.0.0.1:0".to_owned());
        settings.research = true;
        settings.discovery.mdns = false;
        settings.discovery.static_peers = vec![founder.address.parse().expect("an address")];
        let node = Node::start(Arc::new(key), log, settings, Arc::new(Registry::new()));
        let node = runtime.block_on(node).expect("a node");
        node.serve_weights(Arc::new(Liar(part)), Arc::new(|| false));
        Self {
            address: node.listen_addr().expect("an address").to_string(),
            _runtime: runtime,
            _node: node,
        }
    }
}

#[test]
fn a_neighbour_that_sends_wrong_pieces_is_dropped_and_named() {
    let (attic, first) = founded(&medium(6));
    let liar = Household::new(ALL, &[&first.address]);
    let join = [
        "community",
        "join",
        "--research",
        "on",
        "--name",
        "Pinocchio",
        first.code(),
    ];
    succeeded(&liar.run(&join));
    let part = attic.part().expect("a part");
    let lies = Lies::start(&liar.home, &first, part);

    let cellar = Household::new(ALL, &[&lies.address, &first.address]).holding(5);
    let second = cellar.up(&["--join", first.code()]);
    cellar.until_serving(&second);
    let said = second.said();
    let dropped = said
        .lines()
        .find(|line| line.contains("no longer fetching from"));
    let dropped = dropped.unwrap_or_else(|| panic!("the liar was not dropped: {said}"));
    assert_contains(dropped, &["Pinocchio", "sent wrong bytes for piece"]);
    genuine(&cellar);
    let needed = needed(&cellar, 5);
    assert!(first.sent() * 100 <= needed * 102);
}

/// Runs `up` of an existing home on a disk that is too small, until it says so, then on a larger
/// one. `$1` is the mount point, the rest the command.
const SCRIPT: &str = r#"
disk=$1; shift
mount -t tmpfs -o size=16m tmpfs "$disk" || exit 77
XDG_CACHE_HOME=$disk "$@" >"$disk.out" 2>"$disk.err" &
node=$!
trap 'kill $node' EXIT
wait_for() {
    for _ in $(seq 600); do
        grep -q "$1" "$2" && return
        sleep 0.2
    done
    cat "$disk.err"
    exit 1
}
wait_for 'free some space' "$disk.err"
echo full
mount -o remount,size=400m "$disk"
wait_for 'fetched .* in ' "$disk.err"
echo fetched
"#;

#[test]
fn a_full_disk_is_named_and_the_fetch_goes_on_when_there_is_room() {
    let (_attic, first) = founded(&medium(4));
    let cellar = Household::new(ALL, &[&first.address]);
    join(&cellar, &first);
    let up = [
        "up",
        "--no-open",
        "--http",
        "127.0.0.1:0",
        "--listen",
        "127.0.0.1:0",
    ];
    let program = cellar.command(&up);
    let Some(output) = crate::full_disk::on_a_disk(&cellar.home, SCRIPT, &[], &program) else {
        return;
    };
    assert_eq!(succeeded(&output), "full\nfetched\n");
}

#[test]
fn two_homes_that_fetch_from_each_other_serve_only_genuine_pieces() {
    let (_attic, first) = founded(&medium(4));
    let homes = [(); 2].map(|()| Household::new(ALL, &[&first.address]).holding(3));
    let ups = homes
        .each_ref()
        .map(|home| home.up(&["--join", first.code()]));
    for (home, up) in homes.iter().zip(&ups) {
        home.until_serving(up);
        genuine(home);
    }
    let needed: u64 = homes.iter().map(|home| needed(home, 3)).sum();
    let sent = first.sent() + ups.iter().map(Up::sent).sum::<u64>();
    assert!(sent * 100 <= needed * 102, "{sent} for {needed}");
}

#[test]
fn a_part_of_a_model_that_was_dropped_meanwhile_is_removed_at_the_next_start() {
    let model = TinyLlama {
        layers: 4,
        ..TinyLlama::default()
    };
    let (attic, first) = founded(&model);
    let file = attic.home.path().join("tiny-q4_1-1.gguf");
    assert!(file.is_file());
    let cellar = Household::new(ALL, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    cellar.until_serving(&second);
    second.stop();
    let (name, part) = (weights_id(&cellar), cellar.parts().pop().expect("a part"));
    // A part that another home uses.
    let other = part.with_file_name("ab".repeat(32));
    std::fs::create_dir(&other).expect("a folder");

    succeeded(&attic.run(&["model", "drop", &name]));
    until("the founder removes its part", || attic.parts().is_empty());
    assert!(file.is_file(), "the file of the user is gone");
    // A command learns of it, so that the daemon does not follow the model.
    let pulled = cellar.run(&["model", "pull", &name, "--layers", "0-0"]);
    assert_complains(&pulled, "has adopted no model");
    assert_eq!(cellar.parts().len(), 2);

    let _second = cellar.up(&[]);
    until("the part is removed", || cellar.parts() == [other.clone()]);
}

#[test]
fn a_daemon_with_the_whole_file_offers_it_to_neighbours() {
    let (_attic, first) = founded(&medium(3));
    let cellar = Household::new(ALL, &[&first.address]);
    join(&cellar, &first);
    let file = medium(3).write(cellar.home.path());
    let second = cellar.serve(&["--model", file.to_str().expect("UTF-8")]);
    until("its file is a part", || {
        let part = cellar.part();
        part.is_some_and(|part| part.missing(&[part.table().all()]).is_empty())
    });
    let code = first.code().to_owned();
    first.kill();

    let shed = Household::new(ALL, &[&second.address]);
    let third = shed.up(&["--join", &code]);
    shed.until_serving(&third);
    let (needed, sent) = (needed(&shed, 2), second.sent());
    assert!(
        sent >= needed && sent * 100 <= needed * 102,
        "{sent} for {needed}"
    );
    assert!(cellar.part().expect("a part").is_shared());
    genuine(&shed);
}

#[test]
fn pieces_come_from_a_drive_and_parts_go_with_their_home() {
    let (attic, first) = founded(&medium(3));
    let cellar = Household::new(ALL, &[&first.address]);
    join(&cellar, &first);
    // Both models have the same file name.
    let files = [("drive", 3), ("other", 4)].map(|(name, layers)| {
        let folder = cellar.home.path().join(name);
        std::fs::create_dir(&folder).expect("a folder");
        medium(layers).write(&folder)
    });
    let [drive, other] = files.each_ref().map(|file| {
        let folder = file.parent().expect("a folder");
        folder.to_str().expect("UTF-8")
    });
    let name = weights_id(&attic);
    let pull = |from| {
        let options = ["--layers", "0-0", "--from", from];
        cellar.run(&[&["model", "pull", name.as_str()][..], &options].concat())
    };
    let refused = pull(other);
    assert!(!refused.status.success());
    let said = text(&refused.stderr);
    assert_contains(&said, &["has nothing of", "neither the file"]);
    succeeded(&pull(drive));
    let (held, sent) = (genuine(&cellar), first.sent());
    assert!(held > 0 && sent * 10 < held, "{sent} for {held}");

    let second = cellar.up(&["--from", drive]);
    cellar.until_serving(&second);
    let (held, sent) = (genuine(&cellar), first.sent());
    assert!(sent * 10 < held, "{sent} for {held}: {}", second.said());
    second.stop();

    let twin = files[1].to_str().expect("UTF-8");
    let taken = attic.run(&["model", "adopt", twin, "--json"]);
    assert_contains(&text(&taken.stdout), &["name_taken"]);

    let left = cellar.json(&["community", "leave", "--yes", "--json"]);
    assert_eq!(left["removed_parts"].as_array().map(Vec::len), Some(1));
    assert!(cellar.parts().is_empty() && files[0].is_file());
}

#[test]
fn pieces_come_from_a_hugging_face_folder_and_give_the_same_answer() {
    let attic = Household::new(ALL, &[]);
    // As the hub's own programs store it.
    let folder = attic.home.path().join("models--o--r/snapshots/0123abcd");
    TinyDirectory { layers: 4, seed: 3 }.write(&folder);
    let path = folder.to_str().expect("UTF-8");
    let first = attic.up(&["--found", "Elm", "--model", path]);
    let adopted = attic.json(&["model", "adopt", path, "--json"]);
    assert_eq!(
        adopted["sources"],
        serde_json::json!(["hf:o/r@0123abcd/config.json"])
    );
    let alone = attic.alone(&QUESTION, &folder);

    let cellar = Household::new(ALL, &[&first.address]);
    join(&cellar, &first);
    let name = weights_id(&attic);
    let pull = ["model", "pull", &name, "--layers", "0-0", "--from", path];
    until_answered(|| cellar.run(&pull));
    let part = cellar.part().expect("a part");
    assert_eq!(part.held(), part.table().of_layers(0, 0));
    let identity = part.identity();
    let list = part.table().list().len() as u64;
    let objects = identity.head_bytes + identity.manifest_bytes + list;
    // The neighbour has sent only head, manifest and piece list.
    assert!(first.sent() * 100 <= objects * 102, "{}", first.sent());

    let cellar = cellar.holding(4);
    let second = cellar.up(&["--from", path]);
    second.until("all pieces are here", TIMEOUT, || {
        let part = cellar.part();
        part.is_some_and(|part| part.missing(&[part.table().all()]).is_empty())
    });
    assert!(first.sent() * 100 <= objects * 102, "{}", first.sent());
    genuine(&cellar);
    first.kill();
    assert_eq!(succeeded(&cellar.run(&QUESTION)), alone);
}
