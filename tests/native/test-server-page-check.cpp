// sources: server-page-check.cpp server-page-codec.cpp server-page-checksum.cpp

#include "server-page-check.h"

#include "testing.h"

#include <map>

namespace {

constexpr uint32_t MAGIC   = 0x67677371;
constexpr uint32_t VERSION = 3;

typedef std::map<std::string, std::string> files_t;

std::string u32(uint32_t value) {
    return { char(value & 0xff), char(value >> 8 & 0xff), char(value >> 16 & 0xff), char(value >> 24) };
}

std::string state_of(const std::string & text) {
    return u32(MAGIC) + u32(VERSION) + u32(2) + u32(10) + u32(11) + text;
}

server_page_span span(const std::string & text) { return { text.data(), text.size() }; }

template <typename T>
std::string encoded(const T & page) {
    const auto bytes = server_page_encode(page);
    CHECK_EQ(bytes.error, std::string());
    std::string res;
    for (const auto & part : bytes.parts) {
        res.append(static_cast<const char *>(part.data), part.size);
    }
    return res;
}

// two checkpoints: 40 bytes each, and what they hold
constexpr size_t N_BYTES_CHECKPOINTS = 40 + 16 + 40 + 17;

// FILE.ckpt for what is there
void vouch(files_t & files) {
    files.erase(".ckpt");
    server_page_ckpt ckpt;
    ckpt.identity.fields = { { "model", "m" } };
    ckpt.pos_max_target  = 1;
    for (const auto & [suffix, contents] : files) {
        ckpt.members.push_back({ suffix, contents.size(), server_page_checksum(contents.data(), contents.size()) });
    }
    static const std::string target[] = { "first checkpoint", "second checkpoint" };
    ckpt.checkpoints.push_back({ 1, 0, 0, span(target[0]), {}, {} });
    ckpt.checkpoints.push_back({ 2, 0, 1, span(target[1]), {}, {} });
    files[".ckpt"] = encoded(ckpt);
}

// all four files
files_t page() {
    server_page_lora lora;
    lora.adapters = { { "adapter", 0.5f } };
    static const std::string draft_state = "a draft's state", draft_spec = "tail";
    server_page_draft draft;
    draft.state = span(draft_state);
    draft.spec  = span(draft_spec);

    files_t res = { { "", state_of("the state") }, { ".lora", encoded(lora) }, { ".dft", encoded(draft) } };
    vouch(res);
    return res;
}

files_t page_without_lora() {
    auto res = page();
    res.erase(".lora");
    vouch(res);
    return res;
}

// a header with the right checksum over what it says now
void reseal(std::string & file) {
    const size_t n_header = 20 + 20*size_t(uint8_t(file[16]));
    const auto checksum = server_page_checksum(file.data(), n_header);
    for (size_t i = 0; i < 8; ++i) {
        file[n_header + i] = char(checksum >> 8*i);
    }
}

void flip(std::string & text, size_t at) { text[at] ^= 1; }

server_page_checked check(const files_t & files) {
    std::vector<server_page_check_file> list;
    auto head = SERVER_PAGE_HEAD_FOREIGN;
    for (const auto & [suffix, contents] : files) {
        list.push_back({ suffix, span(contents) });
        if (suffix.empty()) {
            head = server_page_read_head(span(contents), MAGIC, VERSION);
        }
    }
    return server_page_check("a", head, list);
}

std::string said(const server_page_checked & checked) {
    static const char * const words[] = { "whole", "plain", "degraded", "damaged", "unknown" };

    std::string res = words[checked.status];
    if (!checked.why.empty()) {
        res += " a" + checked.suffix + ": a " + checked.why;
    }
    for (const auto & loss : checked.losses) {
        res += " | " + loss.suffix + ": " + loss.why;
    }
    for (const auto & suffix : checked.foreign) {
        res += " | foreign " + suffix;
    }
    return res;
}

const std::string FOREIGN = "the file does not begin as a page's files do: it is another program's, or was overwritten";
const std::string HEAD    = "a is no state of a slot, or its head is damaged";
const std::string NO_DRAFT = " | .dft: only a good .ckpt says that it belongs to this state";
const std::string NOT_ITS  = "it is not the file that was written with this state";
const std::string REMEDY   = "). To load the state unchecked, as llama-server does without sidecars, remove 'a.ckpt' or move 'a' alone elsewhere";

// a's .ckpt is there, and what is wrong with it
std::string unvouched(const std::string & what, const std::string & why) {
    return "a is vouched for by nothing: 'a.ckpt' " + what + " (" + why + REMEDY;
}
std::string of_another_size(size_t n_there, size_t n_written) {
    return "it was written with " + std::to_string(n_written) + " bytes of 'a', which has " + std::to_string(n_there) +
            ": another program wrote that since, or it is damaged, which only a restore can tell";
}

const std::string LORA    = "a was computed with adapters that are not known: 'a.lora': ";

bool contains(const std::string & text, const std::string & part) { return text.find(part) != std::string::npos; }

}

TEST(a_whole_page_gives_out_all_that_is_in_it) {
    const auto files   = page();
    const auto checked = check(files);
    CHECK_EQ(said(checked), std::string("whole"));
    CHECK(checked.has_ckpt);
    CHECK_EQ(checked.ckpt.checkpoints.size(), size_t(2));
    CHECK(checked.lora && checked.lora->adapters.size() == 1);
    CHECK(checked.draft && checked.draft->state.size == 15 && checked.draft->spec.size == 4);

    const auto bare_files = page_without_lora();
    const auto bare = check(bare_files);
    CHECK_EQ(said(bare), std::string("whole"));
    CHECK(bare.lora && bare.lora->adapters.empty()); // it is known that there were none
}

TEST(every_bit_of_every_file_is_vouched_for) {
    for (const auto & [suffix, contents] : page()) {
        for (size_t i = 0; i < 8*contents.size(); ++i) {
            auto files = page();
            files[suffix][i/8] ^= char(1 << i%8);
            const auto checked = check(files);
            const bool is_lost_part = suffix == ".dft" || (suffix == ".ckpt" && i/8 >= contents.size() - N_BYTES_CHECKPOINTS);
            CHECK_EQ(checked.status, is_lost_part ? SERVER_PAGE_CHECK_DEGRADED : SERVER_PAGE_CHECK_DAMAGED);
            CHECK_EQ(checked.suffix, is_lost_part ? "" : suffix);
            CHECK_EQ(checked.why.empty(), is_lost_part);
            CHECK(checked.foreign.empty());
        }
    }
}

TEST(every_shorter_file_is_found) {
    for (const auto & [suffix, contents] : page()) {
        for (size_t n = 0; n < contents.size(); ++n) {
            auto files = page();
            files[suffix].resize(n);
            const auto checked = check(files);
            CHECK_EQ(checked.status, suffix == ".dft" ? SERVER_PAGE_CHECK_DEGRADED : SERVER_PAGE_CHECK_DAMAGED);
            const bool is_head_whole = suffix.empty() && n >= state_of("").size();
            CHECK_EQ(checked.suffix, suffix == ".dft" ? "" : is_head_whole ? ".lora" : suffix);
        }
    }
}

TEST(a_file_alone_is_plain_and_only_its_head_can_be_judged) {
    CHECK_EQ(said(check({ { "", state_of("x") } })), std::string("plain | .ckpt: it is missing"));
    const auto beside = check({ { "", state_of("x") }, { ".ckpt", "another program's" } });
    CHECK_EQ(said(beside), "plain | .ckpt: " + FOREIGN + " | foreign .ckpt");

    auto more_tokens = state_of("x");
    more_tokens[8] = 3;
    CHECK_EQ(said(check({ { "", more_tokens } })), "damaged a: " + HEAD + " | .ckpt: it is missing");
    CHECK_EQ(said(check({ { "", state_of("").substr(0, 9) } })), "damaged a: " + HEAD + " | .ckpt: it is missing");
}

TEST(what_is_not_ours_is_no_damage) {
    CHECK_EQ(said(check({ { "", "a text" } })), "unknown a: " + HEAD + " | .ckpt: it is missing");
    CHECK_EQ(said(check({ { "", "" } })), "unknown a: " + HEAD + " | .ckpt: it is missing");

    const auto newer = u32(MAGIC) + u32(VERSION + 1) + "whatever it has";
    CHECK_EQ(said(check({ { "", newer } })), "unknown a: " + HEAD + " | .ckpt: it is missing");

    // of another libllama, and the checksum says that it is as it was written
    files_t files = { { "", newer } };
    vouch(files);
    CHECK_EQ(said(check(files)), "unknown a: " + HEAD);
    flip(files[""], 20);
    CHECK_EQ(said(check(files)), "damaged a: " + HEAD);

    // an adapter file of somebody's in the way of the name
    const auto lora = check({ { "", state_of("x") }, { ".lora", "GGUF" } });
    CHECK_EQ(said(lora), "unknown a.lora: " + LORA + FOREIGN + " | .ckpt: it is missing | foreign .lora");
}

TEST(a_file_of_ours_without_its_state_is_damage) {
    auto files = page();
    files[""] = "a text";
    CHECK_EQ(check(files).status, SERVER_PAGE_CHECK_DAMAGED);
    files.erase("");
    CHECK_EQ(said(check(files)), std::string("damaged a: a is missing"));
}

TEST(another_version_is_told_from_damage_by_the_checksum) {
    auto files = page();
    files[".ckpt"][12] = 2;
    CHECK_EQ(said(check(files)), "damaged a.ckpt: " + unvouched("is damaged", "its first 16 bytes are damaged: the rest of its header is that of a .ckpt file"));
    reseal(files[".ckpt"]);
    CHECK_EQ(said(check(files)), "unknown a.ckpt: " + unvouched("was written by another version", "the file has format version 2, this server reads version 1"));

    for (const bool is_resealed : { false, true }) {
        const auto damaged = [&](const std::string & suffix) {
            auto res = page();
            res[suffix][12] = 2;
            if (is_resealed) {
                reseal(res[suffix]);
            }
            return res;
        };
        files = damaged(".dft");
        CHECK_EQ(check(files).status, SERVER_PAGE_CHECK_DEGRADED); // FILE.ckpt has another checksum of it
        vouch(files);
        CHECK_EQ(check(files).status, is_resealed ? SERVER_PAGE_CHECK_UNKNOWN : SERVER_PAGE_CHECK_DEGRADED);

        files = damaged(".lora");
        CHECK_EQ(check(files).status, SERVER_PAGE_CHECK_DAMAGED);
        vouch(files);
        CHECK_EQ(check(files).status, is_resealed ? SERVER_PAGE_CHECK_UNKNOWN : SERVER_PAGE_CHECK_DAMAGED);
    }
}

TEST(a_file_that_nobody_can_vouch_for_is_not_restored) {
    auto files = page();
    files[".ckpt"].resize(files[".ckpt"].size() - 1);
    const auto torn = check(files);
    CHECK_EQ(torn.status, SERVER_PAGE_CHECK_DAMAGED);
    CHECK_EQ(torn.suffix, std::string(".ckpt"));
    CHECK(!torn.has_ckpt && !torn.draft && !torn.lora && torn.losses.empty() && torn.foreign.empty());
    CHECK(contains(torn.why, "'a.ckpt' is damaged (the file is cut off: ") && contains(torn.why, REMEDY));

    // what it is of is not asked: it is as bad beside a state alone, or beside what is no state any more
    const auto alone = [](const std::string & state, const std::string & ckpt) { return check({ { "", state }, { ".ckpt", ckpt } }); };
    for (const auto & state : { state_of("x"), std::string("a text"), u32(MAGIC) + u32(VERSION + 1) }) {
        CHECK_EQ(alone(state, "\x89llp").suffix, std::string(".ckpt"));
        CHECK_EQ(alone(state, "\x89llp").status, SERVER_PAGE_CHECK_DAMAGED);
    }
    files[".ckpt"] = page()[".lora"];
    CHECK_EQ(said(check(files)), "damaged a.ckpt: " + unvouched("is damaged", "the file is of kind 2, a .ckpt file is of kind 1"));

    // an empty one makes nobody's file ours
    CHECK_EQ(alone(state_of("x"), "").status, SERVER_PAGE_CHECK_DAMAGED);
    CHECK_EQ(alone("a text", "").status, SERVER_PAGE_CHECK_UNKNOWN);
}

TEST(damage_in_the_first_bytes_is_none_of_another_programs) {
    const auto others = "PK\x03\x04" + std::string(12, 'x');

    for (const std::string suffix : { ".ckpt", ".lora", ".dft" }) {
        auto files = page();
        files[suffix].replace(0, others.size(), others);
        const auto checked = check(files);
        CHECK(checked.foreign.empty());
        CHECK_EQ(checked.status, suffix == ".dft" ? SERVER_PAGE_CHECK_DEGRADED : SERVER_PAGE_CHECK_DAMAGED);
        CHECK(contains(said(checked), "its first 16 bytes are damaged: the rest of its header is that of a " + suffix + " file"));

        // and without a FILE.ckpt
        files.erase(".ckpt");
        if (suffix == ".lora") {
            CHECK_EQ(check(files).status, SERVER_PAGE_CHECK_DAMAGED);
        } else if (suffix == ".dft") {
            CHECK_EQ(said(check(files)), "degraded | .ckpt: it is missing" + NO_DRAFT);
        }
    }
}

// Another program wrote it and knows no sidecars; or it was cut off, and libllama does not take it.
TEST(a_state_of_another_size_is_no_longer_vouched_for) {
    const auto written = page().at("").size();
    for (const auto & text : { state_of("written by another program"), state_of("") }) {
        const auto lost = " | .ckpt: " + of_another_size(text.size(), written);

        auto files = page();
        files[""] = text;
        CHECK_EQ(said(check(files)), "damaged a.lora: " + LORA + NOT_ITS + lost);

        files = page_without_lora();
        files[""] = text;
        const auto checked = check(files);
        CHECK_EQ(said(checked), "degraded" + lost + " | .dft: only a good .ckpt says that it belongs to this state");
        CHECK(!checked.draft && !checked.lora && !checked.has_ckpt && checked.ckpt.identity.fields.empty());
    }
    for (const auto & text : { std::string("a text"), std::string() }) {
        auto files = page();
        files[""] = text;
        CHECK_EQ(said(check(files)), "damaged a: " + HEAD + " | .ckpt: " + of_another_size(text.size(), written));
    }
}

TEST(a_damaged_state_is_not_restored) {
    auto files = page();
    flip(files[""], 25);
    CHECK_EQ(said(check(files)), std::string("damaged a: a is damaged: it is not what was written with 'a.ckpt'"));
}

TEST(a_missing_sidecar_costs_its_part) {
    auto files = page();
    files.erase(".dft");
    const auto no_draft = check(files);
    CHECK_EQ(said(no_draft), std::string("degraded | .dft: it is missing"));
    CHECK(!no_draft.draft && no_draft.lora->adapters.size() == 1 && no_draft.ckpt.checkpoints.size() == 2);

    files = page();
    files.erase(".lora");
    CHECK_EQ(said(check(files)), "damaged a.lora: " + LORA + "it is missing");

    files = page();
    files.erase(".ckpt");
    const auto no_ckpt = check(files);
    CHECK_EQ(said(no_ckpt), "degraded | .ckpt: it is missing" + NO_DRAFT);
    CHECK(!no_ckpt.draft && no_ckpt.lora && no_ckpt.lora->adapters.size() == 1);
}

TEST(a_damaged_checkpoint_is_lost_alone) {
    auto files = page();
    flip(files[".ckpt"], files[".ckpt"].size() - 1);
    const auto checked = check(files);
    CHECK_EQ(said(checked), std::string("degraded | .ckpt: 1 checkpoints are damaged"));
    CHECK_EQ(checked.ckpt.checkpoints.size(), size_t(1));
    CHECK(checked.draft.has_value());
}

TEST(a_sidecar_that_is_no_member_is_told_and_not_used) {
    for (const std::string suffix : { ".dft", ".lora" }) {
        const auto leftover = page().at(suffix);

        auto files = page();
        files.erase(suffix);
        vouch(files);
        CHECK_EQ(said(check(files)), std::string("whole"));
        files[suffix] = leftover;
        const auto checked = check(files);
        CHECK_EQ(said(checked), "degraded | " + suffix + ": " + NOT_ITS);
        CHECK(suffix == ".dft" ? !checked.draft : checked.lora && checked.lora->adapters.empty());

        files[suffix] = "another program's";
        CHECK_EQ(said(check(files)), "whole | foreign " + suffix);
        files[suffix] = "";
        CHECK_EQ(said(check(files)), std::string("whole"));
    }
}

//
// splices: every file of a page is that of one generation, that of another one, or not there
//

namespace {

enum origin { FROM_A, FROM_B, ABSENT };

const char * const SPLICED[] = { "", ".ckpt", ".lora", ".dft" };

// which files a generation has beside FILE and FILE.ckpt
struct shape {
    bool has_lora;
    bool has_dft;

    bool has(const std::string & suffix) const { return suffix == ".lora" ? has_lora : suffix == ".dft" ? has_dft : true; }
};

struct generation {
    std::string text;
    shape       has;
    files_t     files;

    generation(const std::string & text, float scale, shape has) : text(text), has(has) {
        files[""] = state_of("the state " + text);

        server_page_lora lora;
        lora.adapters = { { "adapter " + text, scale } };
        if (has.has_lora) {
            files[".lora"] = encoded(lora);
        }
        server_page_draft draft;
        draft.state = span(this->text);
        if (has.has_dft) {
            files[".dft"] = encoded(draft);
        }

        server_page_ckpt ckpt;
        ckpt.identity.fields = { { "model", text } };
        for (const auto & [suffix, contents] : files) {
            ckpt.members.push_back({ suffix, contents.size(), server_page_checksum(contents.data(), contents.size()) });
        }
        files[".ckpt"] = encoded(ckpt);
    }

    // what was given out is this generation's
    bool is_of(const server_page_lora & lora) const {
        return lora.adapters.empty() ? !has.has_lora : has.has_lora && lora.adapters[0].first == "adapter " + text;
    }
    bool is_of(const server_page_draft & draft) const { return std::string(static_cast<const char *>(draft.state.data), draft.state.size) == text; }
    bool is_of(const server_page_ckpt  & ckpt)  const { return ckpt.identity.fields[0].second == text; }
};

typedef std::map<std::string, origin> splice;

// by what is written in page-files.md: the status, the file that is to blame, what is told as lost
std::string expected(const splice & from, const std::map<origin, shape> & shapes, bool same_sizes) {
    const auto state = from.at(""), ckpt = from.at(".ckpt"), lora = from.at(".lora"), dft = from.at(".dft");

    if (state == ABSENT) {
        return "damaged a";
    }
    if (ckpt == ABSENT) {
        const bool alone = lora == ABSENT && dft == ABSENT;
        return std::string(alone ? "plain" : "degraded") + " -.ckpt" + (dft == ABSENT ? "" : " -.dft");
    }
    if (ckpt != state && same_sizes) {
        return "damaged a";
    }
    if (ckpt != state) { // nothing vouches for the state
        return lora != ABSENT ? "damaged a.lora" : std::string("degraded -.ckpt") + (dft == ABSENT ? "" : " -.dft");
    }
    const auto & written = shapes.at(state);
    if (written.has_lora && lora != state) {
        return "damaged a.lora";
    }
    const bool lora_left  = !written.has_lora && lora != ABSENT;
    const bool dft_not_it = written.has_dft ? dft != state : dft != ABSENT;

    return std::string(lora_left || dft_not_it ? "degraded" : "whole") + (lora_left ? " -.lora" : "") + (dft_not_it ? " -.dft" : "");
}

std::string outcome(const server_page_checked & checked) {
    static const char * const words[] = { "whole", "plain", "degraded", "damaged", "unknown" };

    std::string res = words[checked.status];
    if (!checked.why.empty()) {
        return res + " a" + checked.suffix;
    }
    for (const auto & loss : checked.losses) {
        res += " -" + loss.suffix;
    }
    return res;
}

int n_splices = 0, n_whole = 0;

void check_splice(const splice & from, const std::map<origin, generation> & generations, bool same_sizes) {
    files_t files;
    bool is_one_generation = true;
    for (const auto & [suffix, origin] : from) {
        if (origin != ABSENT) {
            files[suffix] = generations.at(origin).files.at(suffix);
        }
        const auto state = from.at("");
        is_one_generation = is_one_generation && state != ABSENT &&
                origin == (generations.at(state).has.has(suffix) ? state : ABSENT);
    }

    const auto checked = check(files);
    CHECK_EQ(outcome(checked), expected(from, { { FROM_A, generations.at(FROM_A).has }, { FROM_B, generations.at(FROM_B).has } }, same_sizes));
    CHECK_EQ(checked.status == SERVER_PAGE_CHECK_WHOLE, is_one_generation);
    CHECK(is_one_generation || !checked.why.empty() || !checked.losses.empty());
    n_splices++;
    n_whole += is_one_generation;

    if (!checked.why.empty()) { // nothing is taken out of a page that is refused
        return;
    }
    const auto & state = generations.at(from.at(""));
    if (checked.has_ckpt) {
        CHECK(state.is_of(checked.ckpt));
        CHECK(checked.lora && state.is_of(*checked.lora));
    } else {
        // nothing says of which generation the adapters are: they are taken, and it is told that FILE.ckpt is not there
        CHECK_EQ(checked.losses.at(0).suffix, std::string(".ckpt"));
        CHECK(!checked.draft && checked.ckpt.checkpoints.empty() && checked.ckpt.identity.fields.empty());
        CHECK_EQ(checked.lora.has_value(), from.at(".lora") != ABSENT);
    }
    CHECK(!checked.draft || state.is_of(*checked.draft));
}

}

TEST(every_splice_of_two_generations_is_told) {
    for (const std::string text_b : { "of b", "of b, which is longer" }) {
        for (int shapes = 0; shapes < 16; ++shapes) {
            const std::map<origin, generation> generations = {
                { FROM_A, generation("of a", 0.5f,  { (shapes & 1) != 0, (shapes & 2) != 0 }) },
                { FROM_B, generation(text_b, 0.25f, { (shapes & 4) != 0, (shapes & 8) != 0 }) },
            };
            n_splices = n_whole = 0;
            size_t n_there = 1; // how many there should be
            for (const std::string suffix : SPLICED) {
                n_there *= 1 + generations.at(FROM_A).has.has(suffix) + generations.at(FROM_B).has.has(suffix);
            }
            for (int i = 0; i < 3*3*3*3; ++i) {
                splice from;
                bool is_there = true;
                int rest = i;
                for (const std::string suffix : SPLICED) {
                    from[suffix] = origin(rest % 3);
                    rest /= 3;
                    is_there = is_there && (from[suffix] == ABSENT || generations.at(from[suffix]).has.has(suffix));
                }
                if (is_there) {
                    check_splice(from, generations, text_b.size() == 4);
                }
            }
            CHECK_EQ(size_t(n_splices), n_there);
            CHECK_EQ(n_whole, 2);
        }
    }
}
