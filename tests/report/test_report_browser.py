"""The report in a real browser: Chromium, headless, without network."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import CHROMIUM
from helpers import DATA, measured_result, run_result, trial, write_lines

from wavealign.report.page.html import render
from wavealign.runs.files import load_rows

pytestmark = pytest.mark.browser

SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
LONG = "nnz-bucket+svd(bucket=264,rank=8,seed=12345)/shuffled+phased"
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with everything on it: both sources, heads, long and hostile names, a failure."""
    folder = tmp_path_factory.mktemp("page")
    records = []
    policies = ("original", "nnz", "svd+nnz", "lockstep", LONG, EVIL, *(f"p{i}" for i in range(20)))
    masks = [
        ("xattention_363600", "0-3"),
        ("a_very_long_name_of_a_mask_with_no_end_in_sight", "0-3"),
    ]
    masks += [("heads", str(h)) for h in range(4)]
    for m, (mask, heads) in enumerate(masks):
        for p, policy in enumerate(policies):
            result = run_result(
                mask=mask, mask_digest=f"d{m}", heads=heads, policy=policy,
                time_ms=20.0 - 0.25 * p + m, l2_hit_frac=0.5 + 0.018 * p, energy_j=2.0 + p,
            )  # fmt: skip
            records.append(trial(result, planning_ms=1.0 + p * p))
    records.append(trial(error="out of memory\n" + EVIL + "x" * 300, policy=LONG))
    for p, policy in enumerate(policies[:4]):
        records.append(
            measured_result(
                mask="xattention_363600", mask_digest="d0", heads="0-3", policy=policy,
                time_ms=21.0 - p, gpu="NVIDIA H200",
            )
        )  # fmt: skip
    write_lines(folder / "runs.jsonl", records)
    path = folder / "report.html"
    path.write_text(render(load_rows([folder / "runs.jsonl"]), {}, [], "Orders"))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def show(browser, page, width=1200, dark=False):
    """Load the page at this width and in this scheme."""
    metrics = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
    browser.get(page.as_uri())


def column(browser, index):
    rows = "[...document.querySelectorAll('#table tbody tr')]"
    return browser.execute_script(f"return {rows}.map((row) => row.cells[{index}].textContent)")


def headings(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('#table thead button')].map(b => b.textContent)"
    )


def click(browser, css):
    from selenium.webdriver.common.by import By

    element = browser.find_element(By.CSS_SELECTOR, css)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()
    return element


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_it_renders_without_errors_or_network(browser, page, width, dark):
    for log in ("browser", "performance"):
        browser.get_log(log)
    show(browser, page, width, dark)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert asked
    assert {url.partition(":")[0] for url in asked} <= {"file", "data", "chrome"}  # no network
    assert [url for url in asked if url.startswith("file")] == [page.as_uri()]
    # The page's own colours, not the browser's.
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (max(int(v) for v in paper[4:-1].split(",")) < 60) == dark
    inner, scroll = browser.execute_script(
        "return [innerWidth, document.documentElement.scrollWidth]"
    )
    assert inner == width
    assert scroll <= width


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_cut_off(browser, page, width):
    """No text sticks out of the page, but where its box scrolls; none of a chart's is outside."""
    show(browser, page, width)
    outside = browser.execute_script(
        """
        const right = document.documentElement.clientWidth + 1;
        const out = [];
        for (const node of document.querySelectorAll("main *, header *, footer *")) {
          if (node.closest(".scroll, svg, .skip, option") || !node.offsetParent) continue;
          const box = node.getBoundingClientRect();
          if (box.right > right || box.left < -1) out.push(node.outerHTML.slice(0, 80));
        }
        for (const text of document.querySelectorAll("svg.chart text")) {
          const box = text.getBoundingClientRect();
          const frame = text.ownerSVGElement.getBoundingClientRect();
          if (box.width && (box.left < frame.left - 1 || box.right > frame.right + 1))
            out.push(text.textContent);
        }
        return out;
        """
    )
    assert outside == []


def test_hostile_names_stay_text(browser, page):
    show(browser, page)
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert browser.execute_script("return document.scripts.length") == 2
    assert EVIL in browser.execute_script("return document.querySelector('#heat').textContent")


def test_columns_sort_both_ways(browser, page):
    show(browser, page)
    names = headings(browser)
    at = names.index("time (ms)")
    button = f"#table thead th:nth-child({at + 1}) button"
    assert column(browser, at) != sorted(column(browser, at), key=float)
    click(browser, button)
    while browser.execute_script("return !document.querySelector('#more').hidden"):
        click(browser, "#more")
    down = [float(v) for v in column(browser, at)]
    assert len(down) == 6 * 26 + 4
    assert down == sorted(down, reverse=True)
    cell = f"document.querySelector('#table thead th:nth-child({at + 1})')"
    assert browser.execute_script(f"return {cell}.getAttribute('aria-sort')") == "descending"
    click(browser, button)
    assert [float(v) for v in column(browser, at)] == sorted(down)
    assert browser.execute_script(f"return {cell}.getAttribute('aria-sort')") == "ascending"
    # What is missing comes last, either way: measured rows have no planning time.
    at = names.index("planning (ms)")
    for _ in range(2):
        click(browser, f"#table thead th:nth-child({at + 1}) button")
        assert column(browser, at)[-4:] == ["–"] * 4


def test_search_and_filters_narrow_the_table(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    show(browser, page)
    status = browser.find_element(By.ID, "status")
    assert status.text == "50 of 160 runs"
    search = browser.find_element(By.CSS_SELECTOR, "#filters input")
    search.send_keys("LOCKSTEP xatt")
    assert set(column(browser, 0)) == {"lockstep"}
    assert status.text == "2 of 2 runs (of 160 in all)"
    labels = browser.find_elements(By.CSS_SELECTOR, "#filters label")
    source = next(label for label in labels if label.text.startswith("source"))
    Select(source.find_element(By.TAG_NAME, "select")).select_by_visible_text("measured")
    assert status.text == "1 of 1 runs (of 160 in all)"
    search.send_keys("nothing like it")
    assert status.text == "0 of 0 runs (of 160 in all)"


def test_the_chooser_changes_the_figures(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    show(browser, page)

    def heat_maps():
        found = browser.find_elements(By.CSS_SELECTOR, "#heat table")
        return [table.text for table in found if table.is_displayed()]

    (measured,) = heat_maps()
    assert "p7" not in measured
    Select(browser.find_element(By.ID, "setting")).select_by_value("1")
    (simulated,) = heat_maps()
    assert "p12" in simulated
    assert simulated != measured
    folded = browser.execute_script("return document.querySelectorAll('#heat tr.more').length")
    assert folded == 10
    assert len(simulated.splitlines()) < 26 + 3
    click(browser, "#heat [data-setting='1'] button.all")
    assert "original" in heat_maps()[0]


def test_the_theme_button(browser, page):
    show(browser, page, dark=False)
    colour = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(colour) == "rgb(255, 255, 255)"
    button = click(browser, "#theme")
    assert browser.execute_script(colour) == "rgb(20, 23, 28)"
    assert button.text == "Light"


def test_charts_answer_to_the_keyboard(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    chart = browser.find_element(By.CSS_SELECTOR, "#why svg.chart")
    browser.execute_script("arguments[0].focus()", chart)
    chart.send_keys(Keys.ARROW_RIGHT)
    tip = browser.find_element(By.ID, "tip")
    first = tip.text
    assert "× original" in first
    chart.send_keys(Keys.ARROW_RIGHT)
    assert tip.text != first
    chart.send_keys(Keys.ARROW_LEFT)
    assert tip.text == first
    chart.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_text_is_legible_in_both_schemes(browser, page):
    """WCAG AA contrast of heat map cells, soft text and chart labels against their ground."""
    script = """
        const options = {willReadFrequently: true};
        const canvas = document.createElement("canvas").getContext("2d", options);
        const rgb = (colour) => {
          canvas.clearRect(0, 0, 1, 1);
          canvas.fillStyle = colour;
          canvas.fillRect(0, 0, 1, 1);
          return [...canvas.getImageData(0, 0, 1, 1).data];
        };
        const luminance = (c) => {
          const [r, g, b] = c.slice(0, 3).map((v) => {
            v /= 255;
            return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
          });
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = (node) => {
          for (; node; node = node.parentElement) {
            const c = rgb(getComputedStyle(node).backgroundColor);
            if (c[3] === 255) return c;
          }
        };
        const kinds = ".heat td, .scale span, .caption, .badge, .tick, .answer, dt, .ties";
        return [...document.querySelectorAll(kinds)]
          .filter((node) => !node.classList.contains("none"))
          .map((node) => {
            const style = getComputedStyle(node);
            const a = luminance(rgb(node instanceof SVGElement ? style.fill : style.color));
            const b = luminance(ground(node));
            return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML.slice(0, 90)];
          })
          .filter(([ratio]) => ratio < 4.5);
    """
    for dark in (False, True):
        show(browser, page, dark=dark)
        assert browser.execute_script(script) == []


def test_it_prints_on_paper(browser, page):
    """The PDF comes out, with everything unfolded."""
    show(browser, page, dark=True)
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    assert pdf["data"].startswith("JVBER")  # "%PDF"
    assert browser.execute_script(
        "return [...document.querySelectorAll('details')].every((part) => part.open)"
    )


def test_real_rows(browser, tmp_path):
    path = tmp_path / "real.html"
    path.write_text(render(load_rows([DATA / "h200", DATA / "paper"]), {}, [], "Measured"))
    browser.get_log("browser")
    for width in (390, 1200):
        show(browser, path, width)
        assert browser.get_log("browser") == []
        scroll = browser.execute_script("return document.documentElement.scrollWidth")
        assert scroll <= width

    # On A4 with margins of 1 cm the heat map of 20 masks still fits; the ground is white.
    show(browser, path, 718, dark=True)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    script = "return [document.documentElement.scrollWidth, %s.backgroundColor]"
    width, ground = browser.execute_script(script % "getComputedStyle(document.body)")
    assert width <= 718
    assert ground == "rgb(255, 255, 255)"
