//! Properties of settings from all sources.

use super::files::EXAMPLE;
use super::sources::{flatten, over_defaults};
use super::{Config, Loaded, starter};
use crate::cli::{Failure, Kind};

impl Config {
    /// Defaults with these settings, `KEY=VALUE` each.
    pub(crate) fn for_test(sets: &[&str]) -> Self {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let loaded = Loaded::load(Some("/dev/null".as_ref()), &sets);
        loaded.unwrap().config
    }
}

fn load(text: &str, sets: &[&str]) -> Result<Loaded, Failure> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    std::fs::write(&path, text).unwrap();
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    Loaded::load(Some(&path), &sets)
}

fn defaults() -> Config {
    over_defaults([]).try_into().unwrap()
}

#[test]
fn the_commented_example_holds_exactly_the_defaults_and_every_key() {
    let loaded = load(EXAMPLE, &[]).unwrap();
    assert_eq!(loaded.config, defaults());
    assert_eq!(load("", &[]).unwrap().config, defaults());
    for (key, _, origin) in loaded.explain() {
        assert_ne!(
            origin, "default",
            "{key} is missing from config/hearthnet.toml"
        );
    }
}

#[test]
fn every_key_of_the_example_is_a_setting() {
    let example: toml::Table = EXAMPLE.parse().unwrap();
    flatten("", &example, &mut |key, _| {
        let (mut rest, (tables, name)) = (example.clone(), key.rsplit_once('.').unwrap());
        let mut table = &mut rest;
        for part in tables.split('.') {
            table = table[part].as_table_mut().unwrap();
        }
        table.remove(name).unwrap();
        assert!(rest.try_into::<Config>().is_err(), "{key} is no setting");
    });
}

#[test]
fn library_defaults_equal_the_configured_defaults() {
    fn same(said: impl std::fmt::Debug, own: impl std::fmt::Debug) {
        assert_eq!(format!("{said:?}"), format!("{own:?}"));
    }
    let all = defaults();
    let listen = "[::1]:1";
    same(all.transport(), hearthnet_transport::Config::default());
    same(
        crate::answering::chat_backends::pump_settings(&all, false),
        hearthnet_orchestrator::sharded::PumpSettings::default(),
    );
    same(
        crate::hosting::host_config::serve_config(&all, listen),
        hearthnet_shard::ServeConfig::new(listen),
    );
    same(
        crate::answering::chat_setup::settings(&all),
        hearthnet_orchestrator::service::ServiceSettings::default(),
    );
    same(
        crate::answering::http::http_settings(&all.http.listen, &all).unwrap(),
        hearthnet_http::HttpSettings::default(),
    );
}

#[test]
fn every_key_of_the_example_has_a_comment() {
    let mut above = "";
    for line in EXAMPLE.lines() {
        if line.contains(" = ") && !line.starts_with('#') {
            assert!(above.starts_with('#'), "no comment above: {line}");
        }
        above = line;
    }
}

#[test]
fn tls_takes_two_files_and_a_socket_is_open_to_its_owner() {
    for (text, why) in [
        (
            "[http]\ntls_key_file = \"k\"",
            "http.tls_certificate_file is needed with http.tls_key_file",
        ),
        (
            "[http]\ntls_certificate_file = \"c\"",
            "http.tls_key_file is needed with http.tls_certificate_file",
        ),
        (
            "[http]\nsocket_mode = \"077\"",
            "http.socket_mode must be permission bits in octal",
        ),
    ] {
        let refusal = refused(text, &[]).0;
        assert!(refusal.contains(why), "{refusal}");
    }
    let both = "[http]\ntls_certificate_file = \"c\"\ntls_key_file = \"k\"\nsocket_mode = \"0660\"";
    load(both, &[]).unwrap();
}

#[test]
fn aliases_have_any_names_and_are_one_setting() {
    let text = "[http.aliases]\n\"gpt-4.1\" = \"m\"\ndefault = \"m\"";
    let loaded = load(text, &["http.aliases={ \"a.b\" = \"n\" }"]).unwrap();
    let aliases = loaded.config.http.aliases.iter();
    let aliases: Vec<String> = aliases.map(|(name, id)| format!("{name}={id}")).collect();
    assert_eq!(aliases, ["a.b=n", "default=m", "gpt-4.1=m"]);
    let rows = loaded.explain();
    assert!(
        rows.iter()
            .any(|row| row.0 == "http.aliases" && row.2 == "--set")
    );
    let refusals = [
        refused("[http.aliases]\nx = 5", &[]).0,
        refused("[http]\naliases = { \"a b\" = \"m\" }", &[]).0,
    ];
    for (refusal, line) in refusals.iter().zip([1, 2]) {
        let begin = format!("c.toml:{line}: http.aliases must map names to ids");
        assert!(refusal.starts_with(&begin), "{refusal}");
    }
}

#[test]
fn a_new_configuration_sets_only_the_requested_keys() {
    assert_eq!(load(&starter(false), &[]).unwrap().config, defaults());
    let mut on = defaults();
    on.policy.research.enable = true;
    assert_eq!(load(&starter(true), &[]).unwrap().config, on);
    for line in EXAMPLE.lines().filter(|l| !l.starts_with('#')) {
        assert!(starter(false).contains(line), "{line}");
    }
}

#[test]
fn a_flag_overrides_the_file_and_says_so() {
    let loaded = load("[engine]\nthreads = 2", &["engine.threads=3"]).unwrap();
    assert_eq!(loaded.config.engine.threads.0, 3);
    let rows = loaded.explain();
    let row = rows.iter().find(|r| r.0 == "engine.threads").unwrap();
    assert_eq!((row.1.as_str(), row.2.as_str()), ("3", "--set"));
}

fn refused(text: &str, sets: &[&str]) -> (String, String) {
    let failure = load(text, sets).unwrap_err();
    let hint = failure.hint_text().unwrap_or_default().to_owned();
    // The directory's name differs each time.
    let message = failure.to_string();
    let at = message.find("c.toml").unwrap_or(0);
    (message[at..].to_owned(), hint)
}

#[test]
fn an_error_names_file_line_and_key_and_what_was_expected() {
    for (text, message) in [
        (
            "# mine\n[engine]\n\nthreads = \"two\"",
            "c.toml:4: engine.threads must be a whole number, 0 or more, not the text \"two\"",
        ),
        (
            "[node]\nname = 5",
            "c.toml:2: node.name must be text in quotes, not 5",
        ),
        (
            "[research.distributed_inference]\nfallback_to_local = \"yes\"",
            "c.toml:2: research.distributed_inference.fallback_to_local must be true or false, \
             not the text \"yes\"",
        ),
        (
            "engine.threads = -1",
            "c.toml:1: engine.threads must be a whole number, 0 or more, not -1",
        ),
        (
            "\n[discovery]\nstatic_peers = \"a\"",
            "c.toml:3: discovery.static_peers must be a list, for example [\"a\", \"b\"], not \
             the text \"a\"",
        ),
        (
            "engine = 3",
            "c.toml:1: engine must be a table of settings, not 3",
        ),
    ] {
        assert_eq!(refused(text, &[]).0, message);
    }
    // Constraints between keys, and invalid TOML.
    for (text, beginning) in [
        (
            "[http]\n[research.distributed_inference]\nbackend = \"petals_like\"",
            "c.toml:3: research.distributed_inference.backend must be \"small_model_layered\"",
        ),
        (
            "[http]\nmax_body_bytes = 5",
            "c.toml:2: http.max_body_bytes must lie",
        ),
        ("[engine]\nthreads = two", "c.toml:2: this is not TOML: "),
        ("[engine]\n\nthreads 2", "c.toml:3: this is not TOML: "),
    ] {
        let (message, _) = refused(text, &[]);
        assert!(message.starts_with(beginning), "{message}");
    }
}

#[test]
fn an_error_of_a_flag_does_not_blame_the_file() {
    let file = "[engine]\nthreads = 2\n[http]\nmax_body_bytes = 4096";
    for (set, message) in [
        (
            "engine.threads=two",
            "--set engine.threads=two: engine.threads must be a whole number, 0 or more, not \
             the text \"two\"",
        ),
        (
            "engine.thread=2",
            "--set engine.thread=2: engine.thread is not a setting",
        ),
        (
            "http.max_body_bytes=5",
            "--set http.max_body_bytes=5: http.max_body_bytes must lie between 1024 and 2^30",
        ),
    ] {
        assert_eq!(refused(file, &[set]).0, message);
    }
    // An error of the file does not blame a flag.
    let wrong = "[engine]\nthreads = \"two\"";
    assert!(
        refused(wrong, &["engine.threads=2"])
            .0
            .starts_with("c.toml:2: ")
    );
}

#[test]
fn a_similar_key_is_suggested() {
    for (text, message, meant) in [
        (
            "[engine]\n thread = 2",
            "c.toml:2: engine.thread is not a setting",
            "engine.threads",
        ),
        (
            "\n[engin]\nthreads = 2",
            "c.toml:2: engin is not a setting",
            "`hearthnet config show`",
        ),
        (
            "[research.distributed_inference]\nkv_budget_mb = 64",
            "c.toml:2: research.distributed_inference.kv_budget_mb is not a setting",
            "research.distributed_inference.host.kv_budget_mb",
        ),
    ] {
        let (said, hint) = refused(text, &[]);
        assert_eq!(said, message);
        assert!(hint.contains(meant), "{hint}");
    }
}

/// Configuration block with the module's published key names.
const PUBLISHED_BLOCK: &str = r#"
[research.distributed_inference]
enabled = true
backend = "small_model_layered"
max_shards_per_request = 16
shard_health_timeout_seconds = 30
fallback_to_local = true
activation_dtype = "fp16"          # "fp16" | "fp32"
allow_self_as_shard = false
max_concurrent_pipelines = 4

[research.distributed_inference.host]
serve_shards = true
shard_eviction_idle_seconds = 600
shard_max_vram_mb = 20000
"#;

#[test]
fn the_published_key_names_are_accepted() {
    let loaded = load(PUBLISHED_BLOCK, &["policy.research.enable=true"]).unwrap();
    let inference = &loaded.config.research.distributed_inference;
    assert!(inference.enabled && inference.host.serve_shards);
    assert_eq!(inference.host.memory_budget_mb.0, 20_000);
    assert!(loaded.config.policy.research.enable);
    let rows = loaded.explain();
    let key = "research.distributed_inference.host.memory_budget_mb";
    let row = rows.iter().find(|row| row.0 == key).unwrap();
    assert!(row.1 == "20000" && row.2.ends_with("c.toml:15"), "{row:?}");
    // Either the key or its alias is accepted.
    let (message, _) = refused(&format!("{PUBLISHED_BLOCK}memory_budget_mb = 5"), &[]);
    assert!(message.contains("memory_budget_mb"), "{message}");
    let over = load(
        PUBLISHED_BLOCK,
        &["research.distributed_inference.host.shard_max_vram_mb=7"],
    );
    let over = over.unwrap().config.research.distributed_inference;
    assert_eq!(over.host.memory_budget_mb.0, 7);
}

#[test]
fn the_niceness_is_found_below_its_alias() {
    let alias = "[research.distributed_inference.host]\nniceness = 7\n";
    let loaded = load(alias, &[]).unwrap();
    assert_eq!(loaded.config.manners.niceness.0, 7);
    let rows = loaded.explain();
    let row = rows.iter().find(|row| row.0 == "manners.niceness").unwrap();
    assert!(row.2.ends_with("c.toml:2"), "{row:?}");
    let (message, _) = refused(&format!("{alias}\n[manners]\nniceness = 3"), &[]);
    assert!(message.contains("manners.niceness"), "{message}");
}

#[test]
fn the_module_is_on_only_where_both_switches_are() {
    let on = |text: &str| {
        let loaded = load(text, &[]).unwrap();
        (loaded.config.policy.research.enable, loaded.module_is_off)
    };
    let policy = "policy.research.enable = true\n";
    let module = "research.distributed_inference.enabled = ";
    assert_eq!(on(policy), (true, false));
    assert_eq!(on(&format!("{policy}{module}true")), (true, false));
    assert_eq!(on(&format!("{policy}{module}false")), (false, true));
    assert_eq!(on(&format!("{module}true")), (false, false));
}

#[test]
fn values_out_of_range_name_the_setting() {
    for set in [
        "research.distributed_inference.max_shards_per_request=0",
        "research.distributed_inference.shard_health_timeout_seconds=0.0",
        "research.distributed_inference.shard_health_timeout_seconds=nan",
        "research.distributed_inference.audit_share=1.5",
        "research.distributed_inference.routing_policy=random",
        "research.distributed_inference.fallback_to_local_after_failures=0",
        "research.distributed_inference.room_timeout_seconds=0",
        "research.distributed_inference.room_timeout_before_fallback_seconds=86401",
        "research.distributed_inference.history_mb=9999999",
        "research.distributed_inference.max_concurrent_pipelines=0",
        "research.distributed_inference.kept_conversation_seconds=0",
        "http.max_body_bytes=5",
        "research.distributed_inference.host.max_concurrent_streams=0",
        "research.distributed_inference.host.memory_budget_mb=2000000000",
        "research.distributed_inference.host.drain_seconds=3601",
        "research.distributed_inference.host.kv_share_per_caller_percent=0",
        "research.distributed_inference.host.max_waiting_steps_per_caller=0",
        "research.distributed_inference.host.prefill_piece_ms=0",
        "manners.memory_percent=0",
        "manners.memory_percent=101",
        "manners.cores_percent=0",
        "manners.disk_gb=1000001",
        "manners.quiet_hours=22:00",
        "manners.quiet_hours=22-7",
        "manners.quiet_hours=22:00-22:00",
        "manners.quiet_hours=22:00-24:00",
        "manners.niceness=20",
        "manners.niceness=-1",
        "research.distributed_inference.host.niceness=20",
        "node.listen=somewhere:7600",
        "model.default=\"hf:nobody\"",
        "research.distributed_inference.activation_dtype=fp8",
        "research.distributed_inference.cache_dtype=q4_0",
        "research.distributed_inference.backend=petals_like",
        "research.distributed_inference.host.device=tpu",
        "research.distributed_inference.host.dtype=f16",
        "discovery.static_peers=[\"nowhere\"]",
        "research.distributed_inference.host.serve_layers=7",
        "research.distributed_inference.host.serve_layers=all",
        "node.name=\"two\\nlines\"",
    ] {
        let error = load("", &[set]).unwrap_err().to_string();
        let leaf = set.split('=').next().unwrap().rsplit('.').next().unwrap();
        assert!(error.contains(leaf), "{error}");
    }
}

#[test]
fn quiet_hours_may_pass_midnight() {
    let hours = |set: &str| {
        let loaded = load("", &[&format!("manners.quiet_hours={set}")]).unwrap();
        loaded.config.manners.quiet_hours
    };
    assert_eq!(hours(""), None);
    let (night, noon) = (
        hours("22:00-07:00").unwrap(),
        hours("12:00 - 13:30").unwrap(),
    );
    for (minute, at_night, at_noon) in [
        (0, true, false),
        (419, true, false),
        (420, false, false),
        (719, false, false),
        (720, false, true),
        (809, false, true),
        (810, false, false),
        (1319, false, false),
        (1320, true, false),
    ] {
        assert_eq!(night.contain(minute), at_night, "{minute}");
        assert_eq!(noon.contain(minute), at_noon, "{minute}");
    }
}

#[test]
fn layers_for_others_get_a_share_of_the_cores_and_no_more_than_the_engine() {
    let threads = |percent: u32, engine: usize, cores: usize| {
        let sets = [
            format!("manners.cores_percent={percent}"),
            format!("engine.threads={engine}"),
        ];
        let config = load("", &[&sets[0], &sets[1]]).unwrap().config;
        config.host_threads(cores)
    };
    assert_eq!(threads(100, 8, 8), 8);
    assert_eq!(threads(50, 8, 8), 4);
    assert_eq!(threads(50, 3, 8), 3);
    assert_eq!(threads(30, 8, 4), 1);
    // At least one, whatever the share.
    assert_eq!(threads(1, 8, 4), 1);
}

#[test]
fn a_flag_that_is_not_key_and_value_is_refused() {
    for set in ["novalue", "=1", "a..b=1"] {
        assert!(load("", &[set]).is_err(), "{set}");
    }
}

#[test]
fn host_names_and_origins_are_whole_names_and_no_patterns() {
    load(
        "",
        &[
            "http.allowed_hosts=[\"host.docker.internal\"]",
            "http.cors_origins=[\"http://localhost:3000\", \"app://obsidian.md\"]",
        ],
    )
    .unwrap();
    for (key, wrong) in [
        ("http.allowed_hosts", "*"),
        ("http.allowed_hosts", "name:7602"),
        ("http.allowed_hosts", ""),
        ("http.cors_origins", "*"),
        ("http.cors_origins", "null"),
        ("http.cors_origins", "http://localhost:3000/"),
        ("http.cors_origins", "http://*.example"),
        ("http.cors_origins", "HTTP://localhost"),
    ] {
        let (message, _) = refused("", &[&format!("{key}=[{wrong:?}]")]);
        assert!(message.contains(key), "{message}");
        assert!(message.contains("must list"), "{message}");
    }
}

#[test]
fn an_address_to_listen_on_is_checked_with_the_rest() {
    for key in ["http.listen", "metrics.listen"] {
        for wrong in ["7602", "localhost", "300.1.1.1:7602", "127.0.0.1:99999"] {
            let (message, _) = refused("", &[&format!("{key}={wrong:?}")]);
            assert!(
                message.contains(key) && message.contains("ADDRESS:PORT"),
                "{message}"
            );
        }
        for open in ["0.0.0.0:7602", "[::]:7602", "192.168.1.2:7602"] {
            let (message, _) = refused("", &[&format!("{key}={open}")]);
            assert!(message.contains("a key is needed"), "{message}");
            load(
                "",
                &[&format!("{key}={open}"), "http.api_key_file=/some/key"],
            )
            .unwrap();
        }
        load("", &[&format!("{key}=localhost:7602")]).unwrap();
    }
    load("", &["metrics.listen="]).unwrap();
    refused("", &["http.listen="]);
}

#[test]
fn a_byte_that_is_not_utf_8_is_found_in_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    std::fs::write(&path, b"[node]\n# caf\xe9\nname = \"a\"\n").unwrap();
    let failure = Loaded::load(Some(&path), &[]).unwrap_err();
    assert!(failure.to_string().contains("c.toml:2: "), "{failure}");
    assert!(failure.hint_text().unwrap().contains("UTF-8"));
}

#[test]
fn a_configuration_without_an_end_is_refused_and_one_without_content_is_taken() {
    let refused = |path: &str| Loaded::load(Some(path.as_ref()), &[]).unwrap_err().kind;
    assert_eq!(refused("/dev/zero"), Kind::Config);
    assert_eq!(refused("/"), Kind::Config);
    Loaded::load(Some("/dev/null".as_ref()), &[]).unwrap();
}
