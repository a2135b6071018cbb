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
            CHECK(checked.status != SERVER_PAGE_CHECK_WHOLE && checked.status != SERVER_PAGE_CHECK_PLAIN);
            if (suffix.empty() || suffix == ".lora") {
                CHECK_EQ(checked.status, SERVER_PAGE_CHECK_DAMAGED);
                CHECK_EQ(checked.suffix, suffix);
            } else {
                CHECK(checked.why.empty());
            }
        }
    }
}

TEST(every_shorter_file_is_found) {
    for (const auto & [suffix, contents] : page()) {
        for (size_t n = 0; n < contents.size(); ++n) {
            auto files = page();
            files[suffix].resize(n);
            const auto status = check(files).status;
            CHECK_EQ(status, suffix == ".dft" ? SERVER_PAGE_CHECK_DEGRADED : suffix == ".ckpt" ? SERVER_PAGE_CHECK_DEGRADED : SERVER_PAGE_CHECK_DAMAGED);
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
    const auto ckpt = check(files);
    CHECK_EQ(ckpt.status, SERVER_PAGE_CHECK_UNKNOWN);
    CHECK(ckpt.why.empty() && contains(said(ckpt), ".ckpt: "));

    files = page();
    files[".dft"][12] = 2;
    CHECK_EQ(check(files).status, SERVER_PAGE_CHECK_DEGRADED);
    vouch(files);
    CHECK_EQ(check(files).status, SERVER_PAGE_CHECK_UNKNOWN);

    files = page();
    files[".lora"][12] = 2;
    CHECK_EQ(check(files).status, SERVER_PAGE_CHECK_DAMAGED);
    vouch(files);
    CHECK_EQ(check(files).status, SERVER_PAGE_CHECK_UNKNOWN);
}

TEST(a_state_that_was_written_by_another_program_has_lost_its_sidecars) {
    auto files = page_without_lora();
    files[""] = state_of("written by another program");
    const auto checked = check(files);
    CHECK_EQ(said(checked), "degraded | .ckpt: it was written with another 'a'" + NO_DRAFT);
    CHECK(!checked.has_ckpt && !checked.draft && !checked.lora);
    CHECK(checked.ckpt.checkpoints.empty() && checked.ckpt.identity.fields.empty());

    files = page();
    files[""] = state_of("written by another program");
    CHECK_EQ(said(check(files)), "damaged a.lora: " + LORA + "it is not the file that was written with this state"
            " | .ckpt: it was written with another 'a'");
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

TEST(files_of_two_generations_are_told_apart) {
    for (const std::string suffix : { ".dft", ".lora" }) {
        auto files = page();
        server_page_lora lora;
        lora.adapters = { { "adapter", 0.25f } };
        static const std::string text = "b draft's state";
        server_page_draft draft;
        draft.state = span(text);
        files[suffix] = suffix == ".dft" ? encoded(draft) : encoded(lora);
        const auto checked = check(files);
        CHECK(contains(said(checked), "it is not the file that was written with this state"));
        CHECK_EQ(checked.status, suffix == ".dft" ? SERVER_PAGE_CHECK_DEGRADED : SERVER_PAGE_CHECK_DAMAGED);
    }
}

TEST(ours_is_what_has_our_magic_whole) {
    const auto files = page();
    for (const auto & [suffix, contents] : files) {
        CHECK_EQ(server_page_is_ours(span(contents)), !suffix.empty());
    }
    CHECK(server_page_is_ours({ files.at(".dft").data(), SERVER_PAGE_MAGIC_SIZE }));
    CHECK(!server_page_is_ours({ files.at(".dft").data(), SERVER_PAGE_MAGIC_SIZE - 1 }));
    CHECK(!server_page_is_ours({ nullptr, 0 }));
}
