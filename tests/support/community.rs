//! Community on this machine: a founder, members, no multicast.

use std::process::Output;

use serde_json::Value;

use super::{ENABLE, Home, QUIET, Server, TOGETHER, frames, model, succeeded, words};

/// Settings of every node.
pub(crate) const ALONE: [&str; 6] = [
    "--set",
    "policy.research.enable=true",
    "--set",
    "discovery.mdns=false",
    // Every daemon has an HTTP interface.
    "--set",
    "http.listen=127.0.0.1:0",
];

/// Layers of the hosts of a [`Street`] whose answers are disturbed, in start order.
pub(crate) const RANGES: [&str; 3] = ["0-14", "15-29", "15-29"];

/// Hosts of the second half.
pub(crate) const SECOND: [usize; 2] = [1, 2];

/// Frames of a chat of `tokens` tokens. `on_frames` is called once with the first ones, in the middle
/// of the answer.
pub(crate) fn chat(
    home: &Home,
    tokens: usize,
    how: &[&str],
    on_frames: impl FnOnce(&[Value]),
) -> Vec<Value> {
    let question = "Tell me a long story about a lighthouse keeper and a lost whale.";
    let (model, tokens) = (model(), tokens.to_string());
    let ask = ["chat", question, "--frames", "--model", model];
    let sampled = words("--temperature 0.8 --seed 7 --max-tokens");
    let args = [&ENABLE[..], &ask, &sampled, &[&*tokens], how].concat();
    frames(&mut home.hearthnet(&args), 12, on_frames)
}

/// Founds a community with research enabled.
pub(crate) fn found(founder: &Home) {
    let create = ["community", "create", "Elm Street", "--research", "on"];
    founder.json(&[&create[..], &["--json"]].concat());
}

/// New home that has founded one.
pub(crate) fn founder() -> Home {
    let founder = Home::new();
    found(&founder);
    founder
}

/// Founder and its running node, with extra settings.
pub(crate) fn founded(settings: &[&str]) -> (Home, Server) {
    let founder = founder();
    let node = serve(&founder, settings);
    (founder, node)
}

/// `hearthnet serve` of a member, with its HTTP interface at a free port.
pub(crate) fn serve(home: &Home, settings: &[&str]) -> Server {
    let model = model();
    let command = ["serve", "--model", model, "--http", "127.0.0.1:0"];
    start(home, settings, &command)
}

/// Daemon without a model, for community work only.
pub(crate) fn serve_bare(home: &Home, settings: &[&str]) -> Server {
    let tail = ["serve", "--model", "none", "--listen", "127.0.0.1:0"];
    let args = [&QUIET[..], settings, &tail, &["--json", "--lifeline"]].concat();
    Server::start(home, &args)
}

/// Founder with such a daemon.
pub(crate) fn founded_bare() -> (Home, Server) {
    let founder = founder();
    let node = serve_bare(&founder, &[]);
    (founder, node)
}

/// Runs a command without multicast.
pub(crate) fn run(home: &Home, settings: &[&str], command: &[&str]) -> Output {
    home.run(&[&QUIET[..], settings, command].concat())
}

/// Output of such a command, which must succeed.
#[track_caller]
pub(crate) fn says(home: &Home, settings: &[&str], command: &[&str]) -> String {
    succeeded(&run(home, settings, command))
}

/// JSON output of such a command.
#[track_caller]
pub(crate) fn json(home: &Home, settings: &[&str], command: &[&str]) -> Value {
    let said = says(home, settings, &[command, &["--json"]].concat());
    serde_json::from_str(&said).expect("one JSON object")
}

/// Asserts that the log of a home passes its check.
#[track_caller]
pub(crate) fn log_is_whole(home: &Home) {
    let said = says(home, &[], &["log", "verify"]);
    assert!(said.lines().any(|line| line.starts_with("ok ")), "{said}");
}

/// Address where a node listens for others.
pub(crate) fn address(server: &Server) -> &str {
    server.ready["addresses"][0].as_str().expect("an address")
}

/// Code of a new invite.
pub(crate) fn code(founder: &Home, how: &[&str]) -> String {
    let invite = json(founder, &[], &[&["community", "invite"], how].concat());
    invite["code"].as_str().expect("a code").to_owned()
}

/// Members as a home sees them.
pub(crate) fn members(home: &Home) -> Vec<Value> {
    let said = json(home, &[], &["community", "members"]);
    said["members"].as_array().expect("a list").clone()
}

/// Invites in a home's log.
pub(crate) fn invites(home: &Home) -> Vec<Value> {
    let said = json(home, &[], &["community", "invites"]);
    said["invites"].as_array().expect("a list").clone()
}

/// New trusted member, admitted by the founder's running node.
pub(crate) fn join(founder: &Home, node: &Server) -> Home {
    join_as("trusted", founder, node)
}

/// New member of a level.
pub(crate) fn join_as(level: &str, founder: &Home, node: &Server) -> Home {
    let member = Home::new();
    let code = &code(founder, &["--level", level]);
    let join = ["community", "join", code];
    member.says(&[&ALONE[..], &static_peer(node), &join].concat());
    member
}

/// `hearthnet shard serve` of a member that knows the founder's running node.
pub(crate) fn host(member: &Home, node: &Server, layers: &str) -> Server {
    host_with(member, node, &[], layers)
}

/// `hearthnet shard serve` with extra settings.
pub(crate) fn host_with(member: &Home, node: &Server, settings: &[&str], layers: &str) -> Server {
    let settings = [&static_peer(node)[..], settings].concat();
    let command = ["shard", "serve", "--model", model(), "--layers", layers];
    start(
        member,
        &settings,
        &[&command[..], &["--threads", "1"]].concat(),
    )
}

/// Community whose chats only hosts answer, each of them a member.
pub(crate) struct Street {
    pub(crate) hosts: Vec<Server>,
    pub(crate) node: Server,
    pub(crate) members: Vec<Home>,
    pub(crate) founder: Home,
    /// Node ids of the members.
    pub(crate) ids: Vec<String>,
}

impl Street {
    /// Starts a host with these settings for each range of layers.
    pub(crate) fn start(settings: &[&str], ranges: &[&str]) -> Self {
        let (founder, node) = founded(&TOGETHER);
        let members: Vec<Home> = ranges.iter().map(|_| join(&founder, &node)).collect();
        let start = |(range, member): (&&str, &Home)| host_with(member, &node, settings, range);
        let hosts = ranges.iter().zip(&members).map(start).collect();
        let ids = members.iter().map(Home::node_id).collect();
        Self {
            hosts,
            node,
            members,
            founder,
            ids,
        }
    }
}

/// Setting that names a running node. Its text is leaked, so that it can stand beside constants.
pub(crate) fn static_peer(node: &Server) -> [&'static str; 2] {
    let peers = format!("discovery.static_peers=[\"{}\"]", address(node));
    ["--set", peers.leak()]
}

fn start(home: &Home, settings: &[&str], command: &[&str]) -> Server {
    let tail = ["--listen", "127.0.0.1:0", "--json", "--lifeline"];
    Server::start(home, &[&ALONE[..], settings, command, &tail[..]].concat())
}
