//! ARCHITECTURE.md matches the repository: its table of crates matches the manifests, and every
//! path exists. The modules of a crate do not import each other in a circle. Only one crate names the
//! operating system. No file of a crate is too long.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Folder of a crate.
fn folder(name: &str) -> PathBuf {
    let folders = [root(), root().join("crates")].map(|folder| folder.join(name));
    let folder = folders.into_iter().find(|folder| folder.exists());
    folder.unwrap_or_else(|| panic!("{name}: no folder"))
}

fn architecture() -> String {
    fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md")
}

fn manifest(folder: &str) -> toml::Table {
    let path = root().join(folder).join("Cargo.toml");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.parse()
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Texts between backticks on a line.
fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Rows of the crate table, in order: a crate, and the crates that it imports.
fn table(text: &str) -> Vec<(String, BTreeSet<String>)> {
    text.lines()
        .skip_while(|line| !line.starts_with("| crate |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
            let [name, _contents, imports] = cells[..] else {
                panic!("not three cells: {line}");
            };
            let name = code_spans(name).next().expect("a crate in backticks");
            (
                name.to_owned(),
                code_spans(imports).map(str::to_owned).collect(),
            )
        })
        .collect()
}

/// Crates of the workspace by the last part of their folder, each with its non-test dependencies
/// within the workspace.
fn manifests() -> BTreeMap<String, BTreeSet<String>> {
    let workspace = manifest(".");
    let folders: Vec<&str> = workspace["workspace"]["members"]
        .as_array()
        .expect("a list of members")
        .iter()
        .map(|folder| folder.as_str().expect("the name of a folder"))
        .collect();
    let packages: BTreeMap<&str, toml::Table> = folders
        .into_iter()
        .map(|folder| (folder, manifest(folder)))
        .collect();
    let ours: BTreeSet<&str> = packages
        .values()
        .filter_map(|package| package["package"]["name"].as_str())
        .collect();
    packages
        .iter()
        .map(|(folder, package)| {
            let everywhere = package.get("dependencies");
            let on_some_systems = package
                .get("target")
                .and_then(toml::Value::as_table)
                .into_iter()
                .flat_map(|systems| systems.values())
                .filter_map(|system| system.get("dependencies"));
            let imports = everywhere
                .into_iter()
                .chain(on_some_systems)
                .filter_map(toml::Value::as_table)
                .flat_map(|dependencies| dependencies.keys())
                .filter(|name| ours.contains(name.as_str()))
                .cloned()
                .collect();
            let name = folder.rsplit('/').next().unwrap_or(folder);
            (name.to_owned(), imports)
        })
        .collect()
}

#[test]
fn the_table_of_crates_agrees_with_their_manifests() {
    let rows: BTreeMap<_, _> = table(&architecture()).into_iter().collect();
    assert_eq!(
        rows,
        manifests(),
        "left: ARCHITECTURE.md, right: Cargo.toml"
    );
}

#[test]
fn each_crate_imports_only_crates_in_the_rows_above_it() {
    let mut above = BTreeSet::new();
    for (name, imports) in table(&architecture()) {
        for import in &imports {
            assert!(above.contains(import), "{name} imports {import}");
        }
        assert!(above.insert(name), "a crate stands in the table twice");
    }
    assert!(!above.is_empty(), "no table of crates was found");
}

/// All crates of the workspace that `name` needs to build.
fn needs(name: &str) -> BTreeSet<String> {
    let all = manifests();
    let mut found = BTreeSet::new();
    let mut open = vec![name.to_owned()];
    while let Some(next) = open.pop() {
        for import in &all[&next] {
            if found.insert(import.clone()) {
                open.push(import.clone());
            }
        }
    }
    found
}

#[test]
fn a_host_needs_neither_tokenizer_nor_downloader() {
    let needed = needs("hearthnet-shard");
    for other in ["hearthnet-tokens", "hearthnet-hub"] {
        assert!(!needed.contains(other), "hearthnet-shard needs {other}");
    }
    // The walk does reach what is needed.
    assert!(needed.contains("hearthnet-files"), "{needed:?}");
    assert!(needs("hearthnet").contains("hearthnet-hub"));
}

#[test]
fn every_path_in_architecture_md_exists() {
    let text = architecture();
    let is_path = |span: &&str| {
        let named = [".rs", ".md", ".toml", ".service"];
        !span.contains(char::is_whitespace)
            && !span.starts_with('/')
            && (span.contains('/') || named.iter().any(|end| span.ends_with(end)))
    };
    let paths: BTreeSet<&str> = text.lines().flat_map(code_spans).filter(is_path).collect();
    assert!(paths.len() > 50, "only {} paths were found", paths.len());
    let missing: Vec<&str> = paths
        .into_iter()
        .filter(|path| !root().join(path).exists())
        .collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

/// Unit of which the imports within a crate must form no circle.
#[derive(Clone, Copy)]
enum Unit {
    File,
    /// Files and folders directly below `src`.
    Folder,
}

/// Path of a module in its crate.
type ModulePath = Vec<String>;

/// For each unit the units that it imports.
type Graph = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let mut circles = Vec::new();
    for name in manifests().keys() {
        let sources = Sources::read(name);
        let graphs = [Unit::File, Unit::Folder].map(|unit| sources.graph(unit));
        let found = graphs.iter().filter_map(circle);
        circles.extend(found.map(|circle| format!("{name}: {}", circle.join(" -> "))));
    }
    assert!(circles.is_empty(), "{circles:#?}");
}

/// Crates that may name the operating system: the platform crate, and the crates for tests.
const OF_THE_SYSTEM: [&str; 3] = ["hearthnet-platform", "hearthnet-testkit", "adversarial"];

/// Text that names the operating system: interfaces, files in literals, permission bits.
const SYSTEM_NAMES: [&str; 12] = [
    "std::os::",
    "rustix::",
    "libc::",
    "landlock::",
    "seccompiler::",
    "signal::unix",
    "UnixListener",
    "UnixStream",
    "\"/proc",
    "\"/sys/",
    "\"/dev/",
    "0o",
];

#[test]
fn only_the_platform_names_the_operating_system() {
    let mut found = Vec::new();
    for (name, _) in table(&architecture()) {
        if OF_THE_SYSTEM.contains(&name.as_str()) {
            continue;
        }
        for (module, source) in &Sources::read(&name).0 {
            let named = SYSTEM_NAMES.iter().filter(|it| source.text.contains(**it));
            found.extend(named.map(|it| format!("{name}::{}: {it}", module.join("::"))));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
    // The search does find them. The platform needs no device at present.
    let platform = Sources::read("hearthnet-platform").0;
    for name in SYSTEM_NAMES.into_iter().filter(|it| *it != "\"/dev/") {
        let named = platform.values().any(|source| source.text.contains(name));
        assert!(named, "the platform does not name {name}");
    }
}

/// Most lines of a file, without tests at its end.
const LINES: usize = 600;

#[test]
fn no_file_of_a_crate_has_more_than_600_lines() {
    let mut long = Vec::new();
    for (name, _) in table(&architecture()) {
        for (module, source) in &Sources::read(&name).0 {
            if source.lines > LINES {
                long.push(format!("{name}::{}: {}", module.join("::"), source.lines));
            }
        }
    }
    assert!(long.is_empty(), "split by what they do: {long:#?}");
}

/// Programs may have no test harness (`test = false`), so tests in their main files would not run.
#[test]
fn no_program_has_tests_in_its_main_file() {
    for (name, _) in table(&architecture()) {
        let main = fs::read_to_string(folder(&name).join("src/main.rs"));
        assert!(!main.unwrap_or_default().contains("#[test]"), "{name}");
    }
}

#[test]
fn imports_are_found_in_source_text() {
    let code = r##"
        //! use crate::comment;
        use crate::one::{self, Two as Three, four::*};
        pub(crate) use super::five;
        #[cfg(test)]
        mod tests { use crate::six; }
        #[cfg(all(test, unix))]
        fn helper<A, B>(a: A, b: B) { crate::seven(); }
        fn f<'a>(x: &'a str) -> impl Fn() + use<'a> { ('"', '\'', "use crate::eight;", r#"" use x; "#) }
        use nine::Ten;
    "##;
    let (imports, code) = split_imports(&without_tests(&tokens(code)));
    let found: Vec<String> = imports
        .iter()
        .map(|import| format!("{} as {}", import.path.join("::"), import.name))
        .collect();
    let expected = [
        "crate::one as one",
        "crate::one::Two as Three",
        "crate::one::four::* as *",
        "super::five as five",
        "nine::Ten as Ten",
    ];
    assert_eq!(found, expected);
    assert_eq!(
        imports.iter().filter(|import| import.is_exported).count(),
        1
    );
    assert!(code.contains(&"f".to_owned()) && !code.contains(&"seven".to_owned()));
}

/// A crate with two folders, of which `high` imports `low`.
#[test]
fn an_import_from_above_closes_a_circle() {
    // The circle that `line` in `low` closes.
    let circle_with = |line: &str| {
        let files = [
            ("", "mod low; mod high; pub use high::part::Thing;"),
            ("low", &format!("pub struct Base; {line}")),
            ("high", "mod part; use super::low::Base; fn f(_: Base) {}"),
            ("high part", "pub struct Thing;"),
        ];
        let sources = files.map(|(path, text)| {
            let (imports, code) = split_imports(&without_tests(&tokens(text)));
            let path = path.split_whitespace().map(str::to_owned).collect();
            let (text, lines) = (String::new(), 0);
            (
                path,
                Source {
                    imports,
                    code,
                    text,
                    lines,
                },
            )
        });
        circle(&Sources(sources.into()).graph(Unit::Folder))
    };
    for line in [
        "use crate::high::part::Thing;",
        "use crate::{Thing as It};",
        "use super::high::{part::{self}};",
        "fn f(of: &crate::Thing) {}",
        "fn f() { super::high::part::run(); }",
    ] {
        assert!(circle_with(line).is_some(), "{line}");
    }
    for line in [
        "",
        "/// [`crate::Thing`]",
        "#[cfg(test)] mod tests { use crate::Thing; }",
        "const TEXT: &str = \"use crate::Thing;\";",
    ] {
        assert_eq!(circle_with(line), None, "{line}");
    }
}

/// A circle of imports, with its first unit repeated at the end.
fn circle(graph: &Graph) -> Option<Vec<String>> {
    let mut left = graph.clone();
    // Units that import none of the units left are in no circle.
    loop {
        let names: BTreeSet<String> = left.keys().cloned().collect();
        for imports in left.values_mut() {
            imports.retain(|import| names.contains(import));
        }
        left.retain(|_, imports| !imports.is_empty());
        if left.len() == names.len() {
            break;
        }
    }
    let mut path: Vec<String> = left.keys().take(1).cloned().collect();
    while let Some(next) = path.last().and_then(|last| left.get(last)?.first()) {
        let begin = path.iter().position(|name| name == next);
        path.push(next.clone());
        if let Some(begin) = begin {
            return Some(path.split_off(begin));
        }
    }
    None
}

/// Leaf of a `use` declaration.
struct Import {
    path: Vec<String>,
    /// Name in this module; `*` for all names.
    name: String,
    is_exported: bool,
}

struct Source {
    imports: Vec<Import>,
    /// Code without `use` declarations.
    code: Vec<String>,
    /// Lines before the tests, without comments.
    text: String,
    /// Number of lines before the tests.
    lines: usize,
}

/// Modules of a crate, without those of tests.
struct Sources(BTreeMap<ModulePath, Source>);

impl Sources {
    fn read(name: &str) -> Self {
        let src = folder(name).join("src");
        let mut all = Self(BTreeMap::new());
        all.add(&src, &src.join("lib.rs"), Vec::new());
        assert!(
            all.0.len() > 1 || name == "hearthnet-text",
            "{name}: no modules were found"
        );
        all
    }

    /// Adds the file of module `path` and those of its children, which lie in `folder`.
    fn add(&mut self, folder: &Path, file: &Path, path: ModulePath) {
        let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let (imports, code) = split_imports(&without_tests(&tokens(&text)));
        for words in code.windows(3) {
            let [keyword, child, end] = words else {
                continue;
            };
            if keyword != "mod" || end != ";" {
                continue;
            }
            let inner = folder.join(child);
            let files = [folder.join(format!("{child}.rs")), inner.join("mod.rs")];
            if let Some(file) = files.iter().find(|file| file.exists()) {
                let path = path.iter().chain([child]).cloned().collect();
                self.add(&inner, file, path);
            }
        }
        let before_tests = text.split("#[cfg(test)]\nmod tests {").next();
        let lines = before_tests.unwrap_or_default().lines();
        let count = lines.clone().count();
        let code_lines = lines.filter(|line| !line.trim_start().starts_with("//"));
        let source = Source {
            imports,
            code,
            text: code_lines.collect(),
            lines: count,
        };
        self.0.insert(path, source);
    }

    fn graph(&self, unit: Unit) -> Graph {
        let name = |path: &[String]| match (unit, path) {
            (_, []) => "lib".to_owned(),
            (Unit::File, path) => path.join("::"),
            (Unit::Folder, [first, ..]) => first.clone(),
        };
        let mut graph = Graph::new();
        for (module, source) in &self.0 {
            let imports = graph.entry(name(module)).or_default();
            for path in self.paths(module, source) {
                if let Some(target) = self.module_of(&path, 0) {
                    imports.insert(name(target));
                }
            }
            imports.remove(&name(module));
        }
        graph
    }

    /// Paths in this crate, from its root, that a module uses. A name that it only passes on with
    /// `pub use` is not used.
    fn paths(&self, module: &ModulePath, source: &Source) -> Vec<Vec<String>> {
        let mut all = Vec::new();
        let mut modules: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for child in self.0.keys() {
            if let Some((name, parent)) = child.split_last()
                && parent == module.as_slice()
            {
                modules.insert(name, child.clone());
            }
        }
        for import in &source.imports {
            let Some(path) = self.absolute(module, &import.path) else {
                continue;
            };
            if self.0.contains_key(&path) {
                // Paths that begin with its name follow below. Attributes may name it in strings.
                if !import.is_exported && !source.code.contains(&import.name) {
                    all.push(path.clone());
                }
                modules.insert(&import.name, path);
            } else if !import.is_exported
                || (import.name != "*" && source.code.contains(&import.name))
            {
                all.push(path);
            }
        }
        let code: Vec<&str> = source.code.iter().map(String::as_str).collect();
        for (at, word) in code.iter().enumerate() {
            let before = code.get(..at).unwrap_or_default();
            let after = code.get(at + 1..).unwrap_or_default();
            // After `(in` stands a visibility.
            if !after.starts_with(&["::"])
                || before.ends_with(&["::"])
                || before.ends_with(&["(", "in"])
            {
                continue;
            }
            let pairs = after.chunks(2).take_while(|pair| is_segment(pair));
            let rest = pairs.filter_map(|pair| pair.last().map(|name| (*name).to_owned()));
            match modules.get(word) {
                Some(path) => all.push(path.iter().cloned().chain(rest).collect()),
                None => {
                    let path: Vec<String> = [(*word).to_owned()].into_iter().chain(rest).collect();
                    let begins = ["crate", "self", "super"].contains(word);
                    all.extend(begins.then(|| self.absolute(module, &path)).flatten());
                }
            }
        }
        all
    }

    /// `path`, as written in `module`, from the root of the crate; `None` for another crate.
    fn absolute(&self, module: &ModulePath, path: &[String]) -> Option<Vec<String>> {
        let supers = path.iter().take_while(|name| *name == "super").count();
        let (base, rest) = match path.first()?.as_str() {
            "crate" => (module.get(..0)?, path.get(1..)?),
            "self" => (module.as_slice(), path.get(1..)?),
            "super" => (
                module.get(..module.len().checked_sub(supers)?)?,
                path.get(supers..)?,
            ),
            child => {
                let child: ModulePath = module.iter().cloned().chain([child.to_owned()]).collect();
                let known = self.0.contains_key(&child);
                (known.then_some(module.as_slice())?, path)
            }
        };
        Some(base.iter().chain(rest).cloned().collect())
    }

    /// Module that defines the item at `path`; follows `use`. `None` for an item of another crate.
    fn module_of(&self, path: &[String], depth: usize) -> Option<&ModulePath> {
        let (module, source) = (0..=path.len())
            .rev()
            .find_map(|len| self.0.get_key_value(path.get(..len)?))?;
        let name = path.get(module.len()).filter(|name| *name != "*");
        let Some(name) = name.filter(|_| depth < 16) else {
            return Some(module);
        };
        if let Some(import) = source.imports.iter().find(|import| import.name == *name) {
            let mut path_there = self.absolute(module, &import.path)?;
            path_there.extend(path.iter().skip(module.len() + 1).cloned());
            return self.module_of(&path_there, depth + 1);
        }
        let globs = source.imports.iter().filter(|import| import.name == "*");
        let mut origins = globs.filter_map(|import| {
            let mut there = self.absolute(module, &import.path)?;
            *there.last_mut()? = name.clone();
            let origin = self.module_of(&there, depth + 1)?;
            let defines = |words: &[String]| {
                matches!(words, [keyword, it] if it == name && DEFINING.contains(&&**keyword))
            };
            let source = self.0.get(origin)?;
            (origin != module && source.code.windows(2).any(defines)).then_some(origin)
        });
        origins.next().or(Some(module))
    }
}

/// Keywords before the name of an item.
const DEFINING: [&str; 8] = [
    "const", "enum", "fn", "mod", "static", "struct", "trait", "type",
];

/// True if two tokens continue a path.
fn is_segment(pair: &[&str]) -> bool {
    matches!(pair, ["::", name] if name.starts_with(is_word))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Words and punctuation of Rust code, without comments and literals.
fn tokens(text: &str) -> Vec<String> {
    let text: Vec<char> = text.chars().collect();
    let at = |i: usize| text.get(i).copied().unwrap_or_default();
    let find = |from: usize, end: &dyn Fn(usize) -> bool| {
        let mut i = from;
        while i < text.len() && !end(i) {
            i += 1;
        }
        i
    };
    let mut out = Vec::new();
    let mut i = 0;
    while i < text.len() {
        match (at(i), at(i + 1)) {
            (c, _) if is_word(c) => {
                let end = find(i, &|j| !is_word(at(j)));
                let word: String = text.iter().skip(i).take(end - i).collect();
                let quote = find(end, &|j| at(j) != '#');
                i = end;
                if ["r", "br", "cr"].contains(&&*word) && at(quote) == '"' {
                    let hashes = quote - end;
                    let closes = |j| at(j) == '"' && (1..=hashes).all(|n| at(j + n) == '#');
                    i = find(quote + 1, &closes) + 1 + hashes;
                } else {
                    out.push(word);
                }
            }
            ('/', '/') => i = find(i, &|j| at(j) == '\n'),
            ('/', '*') => {
                let mut open = 0;
                loop {
                    match (at(i), at(i + 1)) {
                        ('/', '*') => (open, i) = (open + 1, i + 2),
                        ('*', '/') => (open, i) = (open - 1, i + 2),
                        _ => i += 1,
                    }
                    if open == 0 || i >= text.len() {
                        break;
                    }
                }
            }
            ('"', _) => {
                i += 1;
                while i < text.len() && at(i) != '"' {
                    i += if at(i) == '\\' { 2 } else { 1 };
                }
                i += 1;
            }
            ('\'', '\\') => i = find(i + 3, &|j| at(j) == '\'') + 1,
            ('\'', _) if at(i + 2) == '\'' => i += 3,
            // A lifetime.
            ('\'', _) => i += 1,
            (':', ':') => {
                out.push("::".to_owned());
                i += 2;
            }
            (c, _) => {
                if !c.is_whitespace() {
                    out.push(c.to_string());
                }
                i += 1;
            }
        }
    }
    out
}

/// Leaves out what is compiled only for tests.
fn without_tests(tokens: &[String]) -> Vec<String> {
    let mut out = Vec::new();
    let mut rest = tokens;
    while let [first, tail @ ..] = rest {
        let head: Vec<&str> = rest.iter().take(7).map(String::as_str).collect();
        rest = match head.as_slice() {
            ["#", "[", "cfg", "(", "test", ..] | ["#", "[", "cfg", "(", "all", "(", "test"] => {
                rest.get(item_len(rest)..).unwrap_or_default()
            }
            _ => {
                out.push(first.clone());
                tail
            }
        };
    }
    out
}

/// Number of tokens of an item with its attributes.
fn item_len(tokens: &[String]) -> usize {
    let (mut depth, mut is_item) = (0, false);
    for (at, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            // The item is the last of its block.
            ")" | "]" | "}" if depth == 0 => return at,
            ")" | "]" => depth -= 1,
            "}" => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            ";" if depth == 0 => return at + 1,
            // A field or an arm of a match.
            "," if depth == 0 && !is_item => return at + 1,
            "impl" | "use" => is_item = true,
            word => is_item |= DEFINING.contains(&word),
        }
    }
    tokens.len()
}

/// Separates the `use` declarations from the other code.
fn split_imports(tokens: &[String]) -> (Vec<Import>, Vec<String>) {
    let (mut imports, mut code) = (Vec::new(), Vec::<String>::new());
    let mut rest = tokens.iter().map(String::as_str).peekable();
    while let Some(token) = rest.next() {
        // `use<'a>` lists the captures of an opaque type.
        if token != "use" || rest.peek() == Some(&"<") {
            code.push(token.to_owned());
            continue;
        }
        let visibility = match code.last().map(String::as_str) {
            Some(")") => code.iter().rposition(|it| it == "("),
            _ => Some(code.len()),
        };
        let visibility = visibility.and_then(|end| end.checked_sub(1));
        let exported = visibility.filter(|at| code.get(*at).is_some_and(|it| it == "pub"));
        if let Some(at) = exported {
            code.truncate(at);
        }
        let before = imports.len();
        leaves(&mut rest, &[], &mut imports);
        for import in imports.iter_mut().skip(before) {
            import.is_exported = exported.is_some();
        }
    }
    (imports, code)
}

/// Reads one tree of a `use` declaration, and the token after it.
fn leaves<'a>(
    tokens: &mut impl Iterator<Item = &'a str>,
    prefix: &[String],
    out: &mut Vec<Import>,
) -> &'a str {
    let mut path = prefix.to_vec();
    let mut name = None;
    let end = loop {
        match tokens.next().unwrap_or(";") {
            "::" => {}
            "{" => {
                while leaves(tokens, &path, out) == "," {}
                path.clear();
            }
            "as" => name = tokens.next().map(str::to_owned),
            end @ ("," | "}" | ";") => break end,
            word => path.push(word.to_owned()),
        }
    };
    if path.len() > prefix.len() {
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        if let Some(name) = name.or_else(|| path.last().cloned()) {
            out.push(Import {
                path,
                name,
                is_exported: false,
            });
        }
    }
    end
}
